package brokerless.spark;

import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.IOException;
import org.apache.spark.SparkEnv;

/** Processes of our own Python package. */
final class Python {
  static final ObjectMapper JSON = new ObjectMapper();

  private Python() {}

  /** The interpreter that has the package: what the session says, else what PySpark itself would use. */
  static String executable() {
    SparkEnv env = SparkEnv.get();
    String named = System.getenv("PYSPARK_PYTHON");
    String fallback = named == null || named.isEmpty() ? "python3" : named;
    return env == null ? fallback : env.conf().get("spark.brokerless.python", fallback);
  }

  static Process start(String task) {
    try {
      return new ProcessBuilder(executable(), "-m", "brokerless.spark_collector.server", task)
          .redirectError(ProcessBuilder.Redirect.INHERIT)
          .start();
    } catch (IOException error) {
      throw new IllegalStateException(
          executable() + " cannot be started (" + error.getMessage() + "): set spark.brokerless.python", error);
    }
  }
}
