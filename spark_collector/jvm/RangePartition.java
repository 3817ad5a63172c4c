package brokerless.spark;

import com.fasterxml.jackson.databind.JsonNode;
import org.apache.spark.sql.connector.read.InputPartition;

/**
 * What one task reads: offsets {@code [first, stop)} of journal {@code id} at the location {@code key}.
 *
 * @param lost the row that stands for a range that is gone, or that others read, as JSON; empty if there is something to read
 * @param segment where the journal holds {@code first}, with the position of a record at or before it; -1 if Python has
 *     to read it
 */
record RangePartition(String key, long first, long stop, String source, long epoch, String id, String lost, long segment, long position,
    byte[] salt) implements InputPartition {
  static RangePartition of(JsonNode json) {
    return new RangePartition(
        json.get("key").asText(),
        json.get("first").asLong(),
        json.get("stop").asLong(),
        json.get("source").asText(),
        json.get("epoch").asLong(),
        json.get("id").asText(),
        json.get("lost").asText(),
        json.get("segment").asLong(),
        json.get("position").asLong(),
        java.util.HexFormat.of().parseHex(json.get("salt").asText()));
  }
}
