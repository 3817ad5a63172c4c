package brokerless.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedInputStream;
import java.io.DataInputStream;
import java.io.IOException;
import java.io.InterruptedIOException;
import java.io.OutputStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayDeque;
import java.util.concurrent.locks.LockSupport;
import org.apache.spark.SparkEnv;

/**
 * A process of our own Python package, {@code spark_collector/source/server.py}. Requests are lines of JSON; answers are a
 * letter, a length and so many bytes. It ends when its input does, so it never outlives this JVM, and when it has been
 * free for a minute. Those that are free are kept for the next query, because starting one takes a fifth of a second.
 */
final class Worker {
  static final ObjectMapper JSON = new ObjectMapper();
  // As many as a small machine has tasks and queries at a time; more than that are ended when they are free.
  private static final int MOST_FREE = 8;
  private static final ArrayDeque<Worker> FREE = new ArrayDeque<>();
  // Between two looks whether the answer is there: soon for those that take a millisecond, seldom for the others.
  private static final long FIRST_PAUSE_NS = 50_000;
  private static final long LONGEST_PAUSE_NS = 10_000_000;

  private final Process process;
  private final OutputStream out;
  private final DataInputStream in;
  private byte[] body;
  private boolean waiting; // something of an answer may still be on its way

  private Worker() {
    String python = executable();
    try {
      process = new ProcessBuilder(python, "-m", "brokerless.spark_collector.source.server")
          .redirectError(ProcessBuilder.Redirect.INHERIT)
          .start();
    } catch (IOException error) {
      throw new IllegalStateException(
          python + " cannot be started (" + error.getMessage() + "): set spark.brokerless.python", error);
    }
    out = process.getOutputStream();
    in = new DataInputStream(new BufferedInputStream(process.getInputStream(), 1 << 20));
  }

  /** The interpreter that has the package: what the session says, else what PySpark itself would use. */
  private static String executable() {
    SparkEnv env = SparkEnv.get();
    String named = System.getenv("PYSPARK_PYTHON");
    String fallback = named == null || named.isEmpty() ? "python3" : named;
    return env == null ? fallback : env.conf().get("spark.brokerless.python", fallback);
  }

  /** A free process, or a new one. Whoever takes it gives it back with {@link #free} or ends it with {@link #end}. */
  static Worker take() {
    while (true) {
      Worker found;
      synchronized (FREE) {
        found = FREE.poll();
      }
      if (found == null) {
        return new Worker();
      }
      try {
        found.send(JSON.createObjectNode().put("task", "ping"));
        found.receive();
        return found;
      } catch (IOException error) {
        found.end(); // its minute was over
      }
    }
  }

  /** Its task is done. It is kept for the next one, unless an answer is on its way that the next one would get. */
  void free() {
    if (!waiting && released()) {
      synchronized (FREE) {
        if (FREE.size() < MOST_FREE) {
          FREE.push(this);
          return;
        }
      }
    }
    end();
  }

  /** Tell it that its minute begins; there is no answer. */
  private boolean released() {
    try {
      write(JSON.createObjectNode().put("task", "free"));
      return true;
    } catch (IOException error) {
      return false;
    }
  }

  void end() {
    process.destroy();
  }

  void send(JsonNode request) throws IOException {
    waiting = true;
    write(request);
  }

  /** Bytes that belong to the last request. */
  void sendBytes(byte[] bytes) throws IOException {
    out.write(bytes);
    out.flush();
  }

  private void write(JsonNode request) throws IOException {
    out.write((request + "\n").getBytes(StandardCharsets.UTF_8));
    out.flush();
  }

  /** Wait for the next message and return its letter. An error that Python tells is thrown. */
  byte receive() throws IOException {
    await();
    byte letter = in.readByte();
    body = new byte[in.readInt()];
    in.readFully(body);
    waiting = letter == 'F' || letter == 'P' || letter == 'L'; // more of them follow
    if (letter == 'E') {
      throw new IllegalStateException(text());
    }
    return letter;
  }

  /** A read from a pipe cannot be interrupted, and Spark stops queries and tasks by interrupting them. */
  private void await() throws IOException {
    long pause = FIRST_PAUSE_NS;
    while (in.available() == 0 && process.isAlive()) {
      if (Thread.currentThread().isInterrupted()) {
        throw new InterruptedIOException("stopped while Python was asked");
      }
      LockSupport.parkNanos(pause);
      pause = Math.min(2 * pause, LONGEST_PAUSE_NS);
    }
  }

  byte[] body() {
    return body;
  }

  String text() {
    return new String(body, StandardCharsets.UTF_8);
  }

  /** What to say when it has ended by itself. */
  static IllegalStateException ended(IOException error) {
    return new IllegalStateException(
        "a Python process of brokerless ended; its own message is in Spark's error output. It is started as \""
            + executable() + " -m brokerless.spark_collector.source.server\": is the package installed there?", error);
  }
}
