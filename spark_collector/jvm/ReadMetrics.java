package brokerless.spark;

import java.io.Serializable;
import org.apache.spark.SparkContext;
import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.metric.CustomSumMetric;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;
import org.apache.spark.util.LongAccumulator;

/** What the tasks of a query count: for a stream's progress (over all its batches), and for the plan in Spark's UI. */
final class ReadMetrics implements Serializable {
  final LongAccumulator skipped;
  final LongAccumulator lost;

  private ReadMetrics(LongAccumulator skipped, LongAccumulator lost) {
    this.skipped = skipped;
    this.lost = lost;
  }

  static ReadMetrics make() {
    SparkContext context = SparkContext.getOrCreate();
    return new ReadMetrics(context.longAccumulator(), context.longAccumulator());
  }

  static CustomMetric[] shown() {
    return new CustomMetric[] {new SkippedFrames(), new LostOffsets()};
  }

  /** Spark makes these by their names. */
  public static final class SkippedFrames extends CustomSumMetric {
    @Override
    public String name() {
      return "skippedFrames";
    }

    @Override
    public String description() {
      return "frames passed over by filters";
    }
  }

  public static final class LostOffsets extends CustomSumMetric {
    @Override
    public String name() {
      return "lostOffsets";
    }

    @Override
    public String description() {
      return "offsets that cannot be read any more";
    }
  }

  record Value(String name, long value) implements CustomTaskMetric {}
}
