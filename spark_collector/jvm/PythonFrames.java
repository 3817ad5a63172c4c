package brokerless.spark;

import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedInputStream;
import java.io.DataInputStream;
import java.io.EOFException;
import java.io.IOException;
import java.io.OutputStream;
import java.nio.charset.StandardCharsets;
import java.util.Map;

/**
 * Frames that Python reads for us: from a publisher's address, or from a journal where something is unusual. Each is a
 * letter, a length and so many bytes: F a frame, L a lost range, E an error, Z the end.
 */
final class PythonFrames implements Frames {
  private final Process process;
  private final DataInputStream in;
  private byte[] buffer;
  private String lost;

  PythonFrames(Piece piece, long next, Map<String, String> options) {
    process = Python.start("read");
    in = new DataInputStream(new BufferedInputStream(process.getInputStream(), 1 << 20));
    ObjectNode request = Python.JSON.createObjectNode();
    request.set("options", Python.JSON.valueToTree(options));
    request.put("key", piece.key()).put("first", next).put("stop", piece.stop());
    request.put("source", piece.source()).put("epoch", piece.epoch());
    try (OutputStream out = process.getOutputStream()) {
      out.write(request.toString().getBytes(StandardCharsets.UTF_8));
    } catch (IOException error) {
      process.destroy();
      throw new IllegalStateException("the reader of brokerless ended; is the package installed for "
          + Python.executable() + "?", error);
    }
  }

  @Override
  public boolean ready() {
    return true; // each frame has a buffer of its own
  }

  @Override
  public boolean advance() throws IOException {
    lost = null;
    byte letter;
    try {
      letter = in.readByte();
      buffer = new byte[in.readInt()];
      in.readFully(buffer);
    } catch (EOFException error) {
      throw new IOException("the reader of brokerless ended early; its own message is in Spark's error output", error);
    }
    if (letter == 'E') {
      throw new IllegalStateException(text());
    }
    if (letter == 'L') {
      lost = text();
    }
    return letter != 'Z';
  }

  private String text() {
    return new String(buffer, StandardCharsets.UTF_8);
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
    return buffer;
  }

  @Override
  public int at() {
    return 0;
  }

  @Override
  public int length() {
    return buffer.length;
  }

  @Override
  public Frames orElse(Piece piece, long next, Map<String, String> options, Unusual why) throws IOException {
    throw new IOException(piece.key() + ": the frame at offset " + next + " cannot be decoded: " + why.getMessage());
  }

  @Override
  public void close() {
    process.destroy();
  }
}
