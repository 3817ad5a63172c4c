package brokerless.spark;

import java.util.HashMap;
import java.util.Map;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/** Goes to the executors with the options. */
final class RangeReaderFactory implements PartitionReaderFactory {
  private final HashMap<String, String> options;
  private final StructType wanted;
  private final Selection selection;
  private final ReadMetrics metrics;

  RangeReaderFactory(Map<String, String> options, StructType wanted, Selection selection, ReadMetrics metrics) {
    this.selection = selection;
    this.metrics = metrics;
    this.options = new HashMap<>(options);
    this.wanted = wanted;
  }

  @Override
  public boolean supportColumnarReads(InputPartition partition) {
    return true;
  }

  @Override
  public PartitionReader<ColumnarBatch> createColumnarReader(InputPartition partition) {
    return new RangeReader((RangePartition) partition, options, wanted, selection, metrics);
  }

  @Override
  public PartitionReader<InternalRow> createReader(InputPartition partition) {
    throw new UnsupportedOperationException("whole columns only");
  }
}
