package brokerless.spark;

import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.IOException;
import java.io.InterruptedIOException;
import java.io.UncheckedIOException;
import java.util.Map;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.write.BatchWrite;
import org.apache.spark.sql.connector.write.DataWriter;
import org.apache.spark.sql.connector.write.DataWriterFactory;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.PhysicalWriteInfo;
import org.apache.spark.sql.connector.write.Write;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.connector.write.WriterCommitMessage;
import org.apache.spark.sql.connector.write.streaming.StreamingDataWriterFactory;
import org.apache.spark.sql.connector.write.streaming.StreamingWrite;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;

/**
 * Rows as events of a journal on the driver's machine. Tasks encode them, the driver hands the messages of a batch to
 * Python ({@code spark_collector/sink/batches.py}), which decides what is refused and appends each batch once.
 */
final class EventWrite implements Write, BatchWrite, StreamingWrite {
  private static final long ONLY = -1; // as in batches.py
  private final Map<String, String> options;
  private final StructType schema;
  private final String query;
  private final String topic;

  private EventWrite(LogicalWriteInfo info) {
    options = info.options().asCaseSensitiveMap();
    schema = info.schema();
    query = info.queryId();
    topic = info.options().getOrDefault("topic", "");
  }

  static final class Builder implements WriteBuilder {
    private final LogicalWriteInfo info;

    Builder(LogicalWriteInfo info) {
      this.info = info;
    }

    @Override
    public Write build() {
      EventWrite made = new EventWrite(info);
      ObjectNode request = made.request("sink");
      ObjectNode columns = request.putObject("columns");
      for (StructField field : made.schema.fields()) {
        columns.put(field.name(), field.dataType().simpleString());
      }
      ask(request); // wrong options and columns fail here, before any task
      return made;
    }
  }

  private ObjectNode request(String task) {
    ObjectNode request = Worker.JSON.createObjectNode().put("task", task);
    request.set("options", Worker.JSON.valueToTree(options));
    return request;
  }

  private static void ask(ObjectNode request, WriterCommitMessage... messages) {
    Worker worker = Worker.take();
    boolean answered = false;
    try {
      worker.send(request);
      for (WriterCommitMessage message : messages) {
        worker.sendBytes(((Events) message).encoded());
      }
      worker.receive();
      answered = true;
    } catch (InterruptedIOException stopped) {
      throw new UncheckedIOException(stopped); // Spark knows it as its own doing
    } catch (IOException error) {
      throw Worker.ended(error);
    } finally {
      if (answered) {
        worker.free();
      } else {
        worker.end();
      }
    }
  }

  private void append(long batch, WriterCommitMessage[] messages) {
    ObjectNode request = request("append").put("query", query).put("batch", batch);
    ArrayNode sizes = request.putArray("sizes");
    for (WriterCommitMessage message : messages) {
      sizes.add(((Events) message).encoded().length);
    }
    ask(request, messages);
  }

  @Override
  public String description() {
    return "brokerless " + options.getOrDefault("path", "");
  }

  @Override
  public BatchWrite toBatch() {
    return this;
  }

  @Override
  public StreamingWrite toStreaming() {
    return this;
  }

  @Override
  public DataWriterFactory createBatchWriterFactory(PhysicalWriteInfo info) {
    return new Factory(schema, topic);
  }

  @Override
  public StreamingDataWriterFactory createStreamingWriterFactory(PhysicalWriteInfo info) {
    return new Factory(schema, topic);
  }

  @Override
  public boolean useCommitCoordinator() {
    return true;
  }

  @Override
  public void commit(WriterCommitMessage[] messages) {
    append(ONLY, messages);
  }

  @Override
  public void commit(long batch, WriterCommitMessage[] messages) {
    append(batch, messages);
  }

  @Override
  public void abort(WriterCommitMessage[] messages) {} // what failed tasks made is forgotten

  @Override
  public void abort(long batch, WriterCommitMessage[] messages) {}

  /** The events of one task: a msgpack array of {@code SinkEvent}. */
  private record Events(byte[] encoded) implements WriterCommitMessage {}

  private record Factory(StructType schema, String topic) implements DataWriterFactory, StreamingDataWriterFactory {
    @Override
    public DataWriter<InternalRow> createWriter(int partition, long task) {
      return new Writer(schema, topic);
    }

    @Override
    public DataWriter<InternalRow> createWriter(int partition, long task, long batch) {
      return new Writer(schema, topic);
    }
  }

  private static final class Writer implements DataWriter<InternalRow> {
    private final EventEncoder encoder;

    Writer(StructType schema, String topic) {
      encoder = new EventEncoder(schema, topic);
    }

    @Override
    public void write(InternalRow row) {
      encoder.add(row);
    }

    @Override
    public WriterCommitMessage commit() {
      return new Events(encoder.take());
    }

    @Override
    public void abort() {}

    @Override
    public void close() {}
  }
}
