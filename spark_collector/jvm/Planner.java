package brokerless.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.IOException;
import java.io.InterruptedIOException;
import java.io.UncheckedIOException;
import java.util.Map;
import java.util.concurrent.locks.ReentrantLock;
import org.apache.spark.SparkContext;
import org.apache.spark.sql.connector.read.InputPartition;

/** The planner of {@code spark_collector/source/planning.py}, in a Python process: questions and answers. */
final class Planner implements AutoCloseable {
  private final ReentrantLock asking = new ReentrantLock();
  private final Worker worker = Worker.take();
  private JsonNode hello;
  private boolean closed;

  Planner(Map<String, String> options) {
    ObjectNode request = Worker.JSON.createObjectNode().put("task", "plan");
    request.set("options", Worker.JSON.valueToTree(options));
    try {
      worker.send(request); // the answer is not waited for: a new process starts while Spark prepares the query
    } catch (IOException error) {
      worker.end();
      throw Worker.ended(error);
    }
  }

  private JsonNode answer() throws IOException {
    worker.receive();
    return Worker.JSON.readTree(worker.body());
  }

  private JsonNode ask(ObjectNode question) {
    asking.lock();
    try {
      if (closed) {
        throw new IllegalStateException("the query has ended");
      }
      if (hello == null) {
        hello = answer();
      }
      if (question == null) {
        return hello;
      }
      worker.send(question);
      return answer();
    } catch (InterruptedIOException stopped) {
      throw new UncheckedIOException(stopped); // Spark knows it as its own doing
    } catch (IOException error) {
      throw Worker.ended(error);
    } finally {
      asking.unlock();
    }
  }

  private static ObjectNode question(String what) {
    return Worker.JSON.createObjectNode().put("task", what);
  }

  /** The option maxEventsPerTrigger; 0 is no limit. */
  long maxEvents() {
    return ask(null).get("max_events").asLong();
  }

  String initial() {
    return ask(question("initial")).get("offsets").asText();
  }

  String latest(String start, long maxEvents) {
    return ask(question("latest").put("start", start).put("max_events", maxEvents)).get("offsets").asText();
  }

  void fixTarget() {
    ask(question("fix_target"));
  }

  String report() {
    return ask(question("report")).get("offsets").asText();
  }

  /** Offsets that exist and were not read yet. */
  long behind(String done) {
    return ask(question("behind").put("done", done)).get("behind").asLong();
  }

  InputPartition[] partitions(String start, String end) {
    return partitions(ask(question("partitions").put("start", start).put("end", end).put("cores", cores())));
  }

  /** The partitions of a batch query: everything between startingOffsets and endingOffsets. */
  InputPartition[] everything() {
    return partitions(ask(question("everything").put("cores", cores())));
  }

  /** Of the executors that the driver has at this moment; on one machine, of the machine. */
  private static int cores() {
    return SparkContext.getOrCreate().defaultParallelism();
  }

  private static InputPartition[] partitions(JsonNode answer) {
    JsonNode partitions = answer.get("partitions");
    InputPartition[] made = new InputPartition[partitions.size()];
    for (int n = 0; n < made.length; n++) {
      made[n] = RangePartition.of(partitions.get(n));
    }
    return made;
  }

  @Override
  public void close() {
    // While another thread waits for an answer, ending the process is what frees it.
    if (asking.tryLock()) {
      try {
        if (!closed) { // after the first time, the process may be somebody else's
          closed = true;
          worker.free();
        }
      } finally {
        asking.unlock();
      }
    } else {
      worker.end();
    }
  }
}
