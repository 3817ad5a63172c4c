package brokerless.spark;

import java.io.IOException;
import java.util.Map;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/**
 * One task. Reads the journal's files itself as long as they are as they should be. At the first thing that is not
 * (damage, a segment that retention took), and for places that are no files, it asks Python for the rest, so that what
 * is refused, skipped or reported as lost is decided in one place.
 */
final class PieceReader implements PartitionReader<ColumnarBatch> {
  // A batch of large events must not hold hundreds of megabytes, one of small events should stay in the cache.
  private static final int BATCH_ROWS = 4096;
  private static final int BATCH_BYTES = 16 << 20;

  private final Piece piece;
  private final Map<String, String> options;
  private final Rows rows;
  private final FrameReader frames;
  private Frames parts;
  private long next;
  private long bytes;
  private boolean done;

  PieceReader(Piece piece, Map<String, String> options, StructType wanted) {
    this.piece = piece;
    this.options = options;
    this.rows = new Rows(wanted);
    this.frames = new FrameReader(rows);
    this.next = piece.first();
  }

  @Override
  public boolean next() throws IOException {
    rows.clear();
    bytes = 0;
    if (!done && !piece.lost().isEmpty()) {
      done = true;
      rows.addLost(piece.lost());
    }
    // Until the batch is full, or what it refers to has to move. What lies before the first offset fills nothing.
    while (!done && (rows.count() == 0 || rows.count() < BATCH_ROWS && bytes < BATCH_BYTES) && fill()) {
      // the condition does it all
    }
    return rows.count() > 0;
  }

  /** Take one part; false when the batch has to be handed over first, or there is nothing more. */
  private boolean fill() throws IOException {
    if (parts == null) {
      parts = piece.segment() >= 0 ? new SegmentFrames(piece) : new PythonFrames(piece, next, options);
    }
    if (rows.count() > 0 && !parts.ready()) {
      return false; // the next read overwrites what the batch refers to
    }
    int before = rows.count();
    try {
      if ((next >= piece.stop() && parts.complete()) || !parts.advance()) {
        done = true;
        return false;
      }
      if (parts.lost() != null) {
        rows.addLost(parts.lost());
      } else {
        bytes += parts.length();
        next = frames.add(parts.buffer(), parts.at(), parts.length(), next, piece.stop(), parts.complete());
      }
    } catch (Unusual unusual) {
      rows.truncate(before);
      parts.close();
      parts = parts.orElse(piece, next, options, unusual);
    }
    return true;
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
