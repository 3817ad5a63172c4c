package brokerless.spark;

import java.io.ByteArrayOutputStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.util.ArrayData;
import org.apache.spark.sql.catalyst.util.MapData;
import org.apache.spark.sql.types.BinaryType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.unsafe.types.UTF8String;

/** Rows as msgpack: {@code [topic, data, content_type, key, headers, time]} each, as {@code sink/events.py} has it. */
final class EventEncoder {
  private static final byte[] NONE = {};
  private final ByteArrayOutputStream out = new ByteArrayOutputStream();
  private final byte[] fixedTopic;
  private final int topicAt;
  private final int dataAt;
  private final boolean binary;
  private final int contentTypeAt;
  private final int keyAt;
  private final int headersAt;
  private final int timeAt;
  private final int kindAt;
  private int count;

  EventEncoder(StructType schema, String topic) {
    fixedTopic = topic.getBytes(StandardCharsets.UTF_8);
    topicAt = at(schema, "topic");
    dataAt = at(schema, "data");
    binary = schema.fields()[dataAt].dataType() instanceof BinaryType;
    contentTypeAt = at(schema, "content_type");
    keyAt = at(schema, "key");
    headersAt = at(schema, "headers");
    timeAt = at(schema, "time");
    kindAt = at(schema, "kind");
  }

  private static int at(StructType schema, String name) {
    return Arrays.asList(schema.fieldNames()).indexOf(name);
  }

  void add(InternalRow row) {
    if (kindAt >= 0 && !Rows.EVENT.equals(row.isNullAt(kindAt) ? null : row.getUTF8String(kindAt))) {
      return;
    }
    count++;
    out.write(0x96);
    if (fixedTopic.length > 0) {
      text(fixedTopic);
    } else {
      required(row, topicAt);
    }
    if (row.isNullAt(dataAt)) {
      out.write(0xc0); // which is refused, with its name
    } else {
      byte[] data = binary ? row.getBinary(dataAt) : row.getUTF8String(dataAt).getBytes();
      number(0xc6, data.length);
      out.writeBytes(data);
    }
    optional(row, contentTypeAt);
    optional(row, keyAt);
    headers(headersAt < 0 || row.isNullAt(headersAt) ? null : row.getMap(headersAt));
    if (timeAt < 0 || row.isNullAt(timeAt)) {
      out.write(0xc0);
    } else {
      out.write(0xd3);
      out.writeBytes(ByteBuffer.allocate(8).putLong(row.getLong(timeAt)).array());
    }
  }

  private void required(InternalRow row, int at) {
    if (row.isNullAt(at)) {
      out.write(0xc0);
    } else {
      text(row.getUTF8String(at).getBytes());
    }
  }

  private void optional(InternalRow row, int at) {
    text(at < 0 || row.isNullAt(at) ? NONE : row.getUTF8String(at).getBytes());
  }

  private void headers(MapData map) {
    int entries = map == null ? 0 : map.numElements();
    number(0xdf, entries);
    for (int n = 0; n < entries; n++) {
      entry(map.keyArray(), n);
      entry(map.valueArray(), n);
    }
  }

  private void entry(ArrayData array, int n) {
    UTF8String value = array.isNullAt(n) ? null : array.getUTF8String(n);
    if (value == null) {
      out.write(0xc0);
    } else {
      text(value.getBytes());
    }
  }

  private void text(byte[] utf8) {
    number(0xdb, utf8.length);
    out.writeBytes(utf8);
  }

  private void number(int kind, int value) {
    out.write(kind);
    out.writeBytes(ByteBuffer.allocate(4).putInt(value).array());
  }

  /** All that was added, as one array. */
  byte[] take() {
    byte[] rows = out.toByteArray();
    return ByteBuffer.allocate(5 + rows.length).put((byte) 0xdd).putInt(count).put(rows).array();
  }
}
