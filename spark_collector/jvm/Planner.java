package brokerless.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.Writer;
import java.io.OutputStreamWriter;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import org.apache.spark.sql.connector.read.InputPartition;

/**
 * The planner in Python as a process of its own: one JSON line per question, one per answer. It ends when its input
 * does, so it never outlives this JVM. {@code spark_collector/server.py} is the other side.
 */
final class Planner implements AutoCloseable {
  private final Process process;
  private final Writer questions;
  private final BufferedReader answers;
  private JsonNode hello;

  Planner(Map<String, String> options) {
    process = Python.start("plan");
    questions = new OutputStreamWriter(process.getOutputStream(), StandardCharsets.UTF_8);
    answers = new BufferedReader(new InputStreamReader(process.getInputStream(), StandardCharsets.UTF_8));
    // Not waited for: it starts while Spark prepares the query.
    send(Python.JSON.valueToTree(options));
  }

  private void send(JsonNode question) {
    try {
      questions.write(question.toString());
      questions.write('\n');
      questions.flush();
    } catch (IOException error) {
      throw ended();
    }
  }

  private JsonNode answer() {
    try {
      String line = answers.readLine();
      if (line == null) {
        throw ended();
      }
      JsonNode found = Python.JSON.readTree(line);
      if (found.has("error")) {
        throw new IllegalStateException(found.get("error").asText());
      }
      return found;
    } catch (IOException error) {
      throw ended();
    }
  }

  private static IllegalStateException ended() {
    return new IllegalStateException(
        "the planner of brokerless ended; its own message is in Spark's error output. It is started as \""
            + Python.executable() + " -m brokerless.spark_collector.server\": is the package installed there?");
  }

  private synchronized JsonNode ask(ObjectNode question) {
    greet();
    send(question);
    return answer();
  }

  private synchronized JsonNode greet() {
    if (hello == null) {
      hello = answer();
    }
    return hello;
  }

  private static ObjectNode question(String what) {
    return Python.JSON.createObjectNode().put("ask", what);
  }

  /** The option maxEventsPerTrigger; 0 is no limit. */
  long maxEvents() {
    return greet().get("max_events").asLong();
  }

  String initial() {
    return ask(question("initial")).get("marks").asText();
  }

  String latest(String start, long maxEvents) {
    return ask(question("latest").put("start", start).put("max_events", maxEvents)).get("marks").asText();
  }

  void aim() {
    ask(question("aim"));
  }

  String report() {
    return ask(question("report")).get("marks").asText();
  }

  InputPartition[] pieces(String start, String end) {
    return partitions(ask(question("pieces").put("start", start).put("end", end)));
  }

  /** The pieces of a batch query: everything between startingOffsets and endingOffsets. */
  InputPartition[] everything() {
    return partitions(ask(question("everything")));
  }

  private static InputPartition[] partitions(JsonNode answer) {
    JsonNode pieces = answer.get("pieces");
    InputPartition[] made = new InputPartition[pieces.size()];
    for (int n = 0; n < made.length; n++) {
      made[n] = Piece.of(pieces.get(n));
    }
    return made;
  }

  @Override
  public void close() {
    // Not synchronized: another thread may wait for an answer, and this is how it is freed.
    process.destroy();
  }
}
