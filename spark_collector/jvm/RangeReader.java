package brokerless.spark;

import java.io.IOException;
import java.util.Map;
import org.apache.hadoop.fs.FileSystem;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/**
 * One task. Reads the journal's files itself as long as they are as they should be. At the first thing that is not
 * (damage, a segment that retention took), and for places that are no files, it asks Python for the rest, so that what
 * is refused, skipped or reported as lost is decided in one place.
 */
final class RangeReader implements PartitionReader<ColumnarBatch> {
  // A batch of large events must not hold hundreds of megabytes, one of small events should stay in the cache.
  private static final int BATCH_ROWS = 4096;
  private static final int BATCH_BYTES = 16 << 20;

  @SuppressWarnings("deprecation") // what Spark itself looks at
  private static final FileSystem.Statistics BYTES = FileSystem.getStatistics("brokerless", PlainFileSystem.class);

  private final RangePartition partition;
  private final Map<String, String> options;
  private final Rows rows;
  private final FrameReader frames;
  private Frames parts;
  private long next;
  private long bytes;
  private boolean done;

  private final ReadMetrics metrics;
  private long skipped;
  private long lost;
  private long counted;

  RangeReader(
      RangePartition partition, Map<String, String> options, StructType wanted, Selection selection, ReadMetrics metrics) {
    this.metrics = metrics;
    this.partition = partition;
    this.options = options;
    this.rows = new Rows(wanted);
    this.frames = new FrameReader(rows, selection);
    this.next = partition.first();
  }

  @Override
  public boolean next() throws IOException {
    rows.clear();
    bytes = 0;
    if (!done && !partition.lost().isEmpty()) {
      done = true;
      addLost(partition.lost());
    }
    // Until the batch is full, or what it refers to has to move. What lies before the first offset fills nothing.
    while (!done && (rows.count() == 0 || rows.count() < BATCH_ROWS && bytes < BATCH_BYTES) && fill()) {
      // the condition does it all
    }
    count();
    return rows.count() > 0;
  }

  /** Take one part; false when the batch has to be handed over first, or there is nothing more. */
  private boolean fill() throws IOException {
    if (parts == null) {
      parts = partition.segment() >= 0 ? new SegmentFrames(partition) : new PythonFrames(partition, next, options, true);
    }
    if (rows.count() > 0 && !parts.ready()) {
      return false; // the next read overwrites what the batch refers to
    }
    int before = rows.count();
    try {
      if ((next >= partition.stop() && parts.complete()) || !parts.advance()) {
        done = true;
        return false;
      }
      if (parts.lost() != null) {
        addLost(parts.lost());
      } else {
        bytes += parts.length();
        counted += parts.length();
        next = frames.add(parts.buffer(), parts.at(), parts.length(), next, partition.stop(), parts.complete());
      }
    } catch (FallbackException fallback) {
      rows.truncate(before);
      parts.close();
      parts = parts.orElse(partition, next, options, fallback);
    }
    return true;
  }

  private void addLost(String json) {
    long offsets = rows.addLost(json);
    lost += offsets;
    metrics.lost.add(offsets);
  }

  /** Tell Spark what was passed over, and how many bytes were read: it asks its own file systems for those. */
  private void count() {
    long passed = frames.takeSkipped();
    skipped += passed;
    metrics.skipped.add(passed);
    BYTES.incrementBytesRead(counted);
    counted = 0;
  }

  @Override
  public CustomTaskMetric[] currentMetricsValues() {
    return new CustomTaskMetric[] {
      new ReadMetrics.Value("skippedFrames", skipped), new ReadMetrics.Value("lostOffsets", lost)
    };
  }

  @Override
  public ColumnarBatch get() {
    return rows.batch();
  }

  @Override
  public void close() throws IOException {
    if (parts != null) {
      parts.close();
    }
  }
}
