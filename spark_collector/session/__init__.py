"""Spark sessions: Java, the jar, SPARK_HOME, a cluster on this machine."""
