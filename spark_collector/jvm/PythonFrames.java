package brokerless.spark;

import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.IOException;
import java.io.InterruptedIOException;
import java.util.Arrays;
import java.util.Map;
import java.util.zip.CRC32;

/**
 * Frames that Python reads for us: from a publisher's address, from a journal where something is fallback, or from a
 * remote tier. The parts of a tier come whole, and are checked here; where one is damaged, Python is asked again for
 * checked frames. See {@code tier/parts.py} for the format of a part.
 */
final class PythonFrames implements Frames {
  private final Worker worker = Worker.take();
  private static final byte[] MAGIC = {'B', 'L', 'P', 'A', 'R', 'T', '1', '\n'};
  private static final int HEADER = 8 + 3 * 4;
  private boolean closed;
  private String lost;
  private int at;
  private int length;
  private int end = -1; // of the part that is being read; -1: there is none

  PythonFrames(RangePartition partition, long next, Map<String, String> options, boolean parts) {
    ObjectNode request = Worker.JSON.createObjectNode().put("task", "read");
    request.set("options", Worker.JSON.valueToTree(options));
    request.put("key", partition.key()).put("first", next).put("stop", partition.stop());
    request.put("source", partition.source()).put("epoch", partition.epoch()).put("id", partition.id());
    request.put("parts", parts);
    try {
      worker.send(request);
    } catch (IOException error) {
      worker.end();
      throw Worker.ended(error);
    }
  }

  @Override
  public boolean ready() {
    return true; // each frame has a buffer of its own
  }

  @Override
  public boolean advance() throws IOException, FallbackException {
    if (at + length < end) {
      at += length;
      length = Frame.length(worker.body(), at);
      return true;
    }
    end = -1;
    byte letter;
    try {
      letter = worker.receive();
    } catch (InterruptedIOException stopped) {
      throw stopped;
    } catch (IOException error) {
      throw Worker.ended(error);
    }
    lost = letter == 'L' ? worker.text() : null;
    if (letter == 'P') {
      openPart();
    } else {
      at = 0;
      length = worker.body().length;
    }
    return letter != 'Z';
  }

  /** Check the part that has come, as a whole, and go to its first frame. */
  private void openPart() throws FallbackException {
    byte[] part = worker.body();
    end = part.length;
    if (part.length < HEADER || !Arrays.equals(part, 0, MAGIC.length, MAGIC, 0, MAGIC.length)) {
      throw new FallbackException("no part of a tier");
    }
    int head = Frame.int32(part, 8);
    if (head < 0 || head > part.length - HEADER
        || crc(part, HEADER, HEADER + head) != Frame.int32(part, 12)
        || crc(part, HEADER + head, part.length) != Frame.int32(part, 16)) {
      throw new FallbackException("a damaged part");
    }
    int after = HEADER + head;
    do { // all of them before the first is used
      int whole = part.length - after < Frame.PREFIX ? -1 : Frame.length(part, after);
      if (whole < 0 || whole > part.length - after) {
        throw new FallbackException("a part with something else than frames");
      }
      after += whole;
    } while (after < part.length);
    at = HEADER + head;
    length = Frame.length(part, at);
  }

  private static int crc(byte[] part, int from, int to) {
    CRC32 crc = new CRC32();
    crc.update(part, from, to - from);
    return (int) crc.getValue();
  }

  @Override
  public boolean complete() {
    return false;
  }

  @Override
  public String lost() {
    return lost;
  }

  @Override
  public byte[] buffer() {
    return worker.body();
  }

  @Override
  public int at() {
    return at;
  }

  @Override
  public int length() {
    return length;
  }

  @Override
  public Frames orElse(RangePartition partition, long next, Map<String, String> options, FallbackException why) throws IOException {
    if (end >= 0) { // of a part
      return new PythonFrames(partition, next, options, false);
    }
    throw new IOException(partition.key() + ": the frame at offset " + next + " cannot be decoded: " + why.getMessage());
  }

  @Override
  public void close() {
    if (!closed) { // after the first time, the process may be somebody else's
      closed = true;
      worker.free();
    }
  }
}
