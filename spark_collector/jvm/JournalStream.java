package brokerless.spark;

import java.util.HashMap;
import java.util.Map;
import java.util.Optional;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.streaming.CompositeReadLimit;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.connector.read.streaming.Offset;
import org.apache.spark.sql.connector.read.streaming.ReadLimit;
import org.apache.spark.sql.connector.read.streaming.ReadMaxRows;
import org.apache.spark.sql.connector.read.streaming.ReportsSourceMetrics;
import org.apache.spark.sql.connector.read.streaming.SupportsTriggerAvailableNow;
import org.apache.spark.sql.types.StructType;

/** Micro-batches. The checkpoint keeps the planner's offsets as the text that it gave: nothing here looks into it. */
final class JournalStream implements MicroBatchStream, SupportsTriggerAvailableNow, ReportsSourceMetrics {
  private final Map<String, String> options;
  private final StructType wanted;
  private final Planner planner;
  private final ReadMetrics metrics = ReadMetrics.make();

  JournalStream(Map<String, String> options, StructType wanted) {
    this.options = options;
    this.wanted = wanted;
    this.planner = new Planner(options);
  }

  /** The planner's offsets. */
  private static final class Offsets extends Offset {
    private final String text;

    Offsets(String text) {
      this.text = text;
    }

    @Override
    public String json() {
      return text;
    }
  }

  @Override
  public Offset initialOffset() {
    return new Offsets(planner.initial());
  }

  @Override
  public Offset deserializeOffset(String json) {
    return new Offsets(json);
  }

  @Override
  public ReadLimit getDefaultReadLimit() {
    long most = planner.maxEvents();
    return most > 0 ? ReadLimit.maxRows(most) : ReadLimit.allAvailable();
  }

  @Override
  public void prepareForTriggerAvailableNow() {
    planner.fixTarget();
  }

  @Override
  public Offset latestOffset(Offset start, ReadLimit limit) {
    return new Offsets(planner.latest(start.json(), mostRows(limit)));
  }

  private static long mostRows(ReadLimit limit) {
    if (limit instanceof ReadMaxRows rows) {
      return rows.maxRows();
    }
    if (limit instanceof CompositeReadLimit several) {
      long least = 0;
      for (ReadLimit one : several.getReadLimits()) {
        long most = mostRows(one);
        least = least == 0 || (most > 0 && most < least) ? most : least;
      }
      return least;
    }
    return 0;
  }

  @Override
  public Offset latestOffset() {
    throw new UnsupportedOperationException("Spark asks with a limit where a stream has one");
  }

  @Override
  public Offset reportLatestOffset() {
    return new Offsets(planner.report());
  }

  @Override
  public InputPartition[] planInputPartitions(Offset start, Offset end) {
    return planner.partitions(start.json(), end.json());
  }

  @Override
  public PartitionReaderFactory createReaderFactory() {
    return new RangeReaderFactory(options, wanted, Selection.of(options), metrics);
  }

  /** For the query's progress: offsets not read yet, offsets lost and frames passed over since the query started. */
  @Override
  public Map<String, String> metrics(Optional<Offset> latestConsumed) {
    Map<String, String> found = new HashMap<>();
    latestConsumed.ifPresent(offset -> found.put("behind", Long.toString(planner.behind(offset.json()))));
    found.put("lostOffsets", metrics.lost.value().toString());
    found.put("skippedFrames", metrics.skipped.value().toString());
    return found;
  }

  @Override
  public void commit(Offset end) {
    // The spool's retention does not wait for Spark; the checkpoint does the remembering.
  }

  @Override
  public void stop() {
    planner.close();
  }
}
