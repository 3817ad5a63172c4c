package brokerless.spark;

import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.IOException;
import java.io.InterruptedIOException;
import java.util.Map;

/** Frames that Python reads for us: from a publisher's address, or from a journal where something is fallback. */
final class PythonFrames implements Frames {
  private final Worker worker = Worker.take();
  private boolean closed;
  private String lost;

  PythonFrames(RangePartition partition, long next, Map<String, String> options) {
    ObjectNode request = Worker.JSON.createObjectNode().put("task", "read");
    request.set("options", Worker.JSON.valueToTree(options));
    request.put("key", partition.key()).put("first", next).put("stop", partition.stop());
    request.put("source", partition.source()).put("epoch", partition.epoch()).put("id", partition.id());
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
  public boolean advance() throws IOException {
    byte letter;
    try {
      letter = worker.receive();
    } catch (InterruptedIOException stopped) {
      throw stopped;
    } catch (IOException error) {
      throw Worker.ended(error);
    }
    lost = letter == 'L' ? worker.text() : null;
    return letter != 'Z';
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
    return 0;
  }

  @Override
  public int length() {
    return worker.body().length;
  }

  @Override
  public Frames orElse(RangePartition partition, long next, Map<String, String> options, FallbackException why) throws IOException {
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
