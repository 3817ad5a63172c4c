package brokerless.spark;

import java.io.Closeable;
import java.io.IOException;
import java.util.Map;

/** Outer frames of a partition, in order. */
interface Frames extends Closeable {
  /** Whether {@link #advance} leaves the buffers of the frames before alone. */
  boolean ready();

  /** Go to the next frame, or lost range; false at the end. */
  boolean advance() throws IOException, FallbackException;

  /** Whether a gap between frames is a fault; otherwise what is missing was told as lost. */
  boolean complete();

  /** The row that stands for a lost range, as JSON; null if this is a frame. */
  String lost();

  byte[] buffer();

  int at();

  int length();

  /** Where the rest comes from when a frame of this cannot be used. */
  Frames orElse(RangePartition partition, long next, Map<String, String> options, FallbackException why) throws IOException;
}
