"""brokerless.spark_collector."""
