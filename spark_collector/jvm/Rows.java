package brokerless.spark;

import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.JsonNode;
import java.nio.charset.StandardCharsets;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarBatch;
import org.apache.spark.unsafe.types.UTF8String;

/** The rows of one batch, column by column. {@code spark_collector/source/schema.py} has the same schema. */
final class Rows {
  static final StructType SCHEMA = new StructType()
      .add("source", DataTypes.StringType, false)
      .add("epoch", DataTypes.LongType, false)
      .add("topic", DataTypes.StringType, false)
      .add("seq", DataTypes.LongType, false)
      .add("offset", DataTypes.LongType, false)
      .add("time", DataTypes.TimestampType, false)
      .add("received", DataTypes.TimestampType, false)
      .add("transport", DataTypes.StringType, false)
      .add("kind", DataTypes.StringType, false)
      .add("content_type", DataTypes.StringType, false)
      .add("data", DataTypes.BinaryType, false)
      .add("key", DataTypes.StringType, false)
      .add("headers", Vectors.Maps.TYPE, false);
  static final UTF8String JOURNAL = UTF8String.fromString("journal");
  static final UTF8String EVENT = UTF8String.fromString("event");
  static final UTF8String SENT = UTF8String.fromString("sent");
  static final UTF8String NONE = UTF8String.fromString("");
  private static final UTF8String JSON = UTF8String.fromString("application/json");

  final Vectors.Strings source = new Vectors.Strings(DataTypes.StringType);
  final Vectors.Longs epoch = new Vectors.Longs(DataTypes.LongType);
  final Vectors.Strings topic = new Vectors.Strings(DataTypes.StringType);
  final Vectors.Longs seq = new Vectors.Longs(DataTypes.LongType);
  final Vectors.Longs offset = new Vectors.Longs(DataTypes.LongType);
  final Vectors.Longs time = new Vectors.Longs(DataTypes.TimestampType);
  final Vectors.Longs received = new Vectors.Longs(DataTypes.TimestampType);
  final Vectors.Strings transport = new Vectors.Strings(DataTypes.StringType);
  final Vectors.Strings kind = new Vectors.Strings(DataTypes.StringType);
  final Vectors.Strings contentType = new Vectors.Strings(DataTypes.StringType);
  final Vectors.Bytes data = new Vectors.Bytes(DataTypes.BinaryType);
  final Vectors.Strings key = new Vectors.Strings(DataTypes.StringType);
  final Vectors.Maps headers = new Vectors.Maps();
  private final Vectors[] all = {
    source, epoch, topic, seq, offset, time, received, transport, kind, contentType, data, key, headers
  };
  private final ColumnarBatch batch;
  private int room;
  private int count;

  /** {@code wanted} has the columns that the batch shows, in its order. */
  Rows(StructType wanted) {
    String[] names = wanted.fieldNames();
    ColumnVector[] shown = new ColumnVector[names.length];
    for (int n = 0; n < names.length; n++) {
      shown[n] = all[SCHEMA.fieldIndex(names[n])];
    }
    batch = new ColumnarBatch(shown);
  }

  int count() {
    return count;
  }

  void clear() {
    count = 0;
    headers.clear();
  }

  /** Drop the rows from {@code to} on. */
  void truncate(int to) {
    count = to;
  }

  /** Room for {@code more} rows after the last; the caller fills them, then calls {@link #added}. */
  int reserve(int more) {
    if (count + more > room) {
      room = Math.max(count + more, 2 * room);
      for (Vectors vector : all) {
        vector.grow(room);
      }
    }
    return count;
  }

  void move(int from, int to) {
    for (Vectors vector : all) {
      vector.move(from, to);
    }
  }

  void added(int rows) {
    count += rows;
  }

  ColumnarBatch batch() {
    batch.setNumRows(count);
    return batch;
  }

  /** The row that stands for a range of offsets; Python made it. How many of them cannot be read any more. */
  long addLost(String json) {
    JsonNode row;
    try {
      row = Worker.JSON.readTree(json);
    } catch (JsonProcessingException error) {
      throw new IllegalStateException("a range that is not JSON: " + json, error);
    }
    int at = reserve(1);
    source.values[at] = UTF8String.fromString(row.get("source").asText());
    epoch.values[at] = row.get("epoch").asLong();
    topic.values[at] = NONE;
    seq.values[at] = row.get("seq").asLong();
    offset.values[at] = row.get("offset").asLong();
    time.values[at] = row.get("time").asLong();
    received.values[at] = row.get("received").asLong();
    transport.values[at] = JOURNAL;
    kind.values[at] = UTF8String.fromString(row.get("kind").asText());
    contentType.values[at] = JSON;
    data.buffers[at] = row.get("data").asText().getBytes(StandardCharsets.UTF_8);
    data.at[at] = 0;
    data.length[at] = data.buffers[at].length;
    key.values[at] = NONE;
    headers.length[at] = 0;
    added(1);
    return row.get("count").asLong();
  }
}
