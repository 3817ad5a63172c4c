"""The data source `brokerless` of Spark."""
