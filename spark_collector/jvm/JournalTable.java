package brokerless.spark;

import java.util.EnumSet;
import java.util.Map;
import java.util.Set;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.SupportsWrite;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.expressions.filter.Predicate;
import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.read.SupportsPushDownRequiredColumns;
import org.apache.spark.sql.connector.read.SupportsPushDownV2Filters;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/** The places of the options as one table of {@link Rows#SCHEMA}. */
final class JournalTable implements SupportsRead, SupportsWrite {
  @Override
  public String name() {
    return "brokerless";
  }

  @Override
  @SuppressWarnings("deprecation") // columns() has this as its default in every Spark that we know
  public StructType schema() {
    return Rows.SCHEMA;
  }

  @Override
  public Set<TableCapability> capabilities() {
    return EnumSet.of(
        TableCapability.BATCH_READ,
        TableCapability.MICRO_BATCH_READ,
        TableCapability.BATCH_WRITE,
        TableCapability.STREAMING_WRITE,
        TableCapability.ACCEPT_ANY_SCHEMA);
  }

  @Override
  public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
    return new EventWrite.Builder(info);
  }

  @Override
  public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
    return new Builder(options.asCaseSensitiveMap());
  }

  private static final class Builder implements SupportsPushDownRequiredColumns, SupportsPushDownV2Filters {
    private final Map<String, String> options;
    private Predicate[] predicates = {};
    private StructType wanted = Rows.SCHEMA;

    Builder(Map<String, String> options) {
      this.options = options;
    }

    @Override
    public void pruneColumns(StructType required) {
      wanted = required;
    }

    @Override
    public Predicate[] pushPredicates(Predicate[] offered) {
      predicates = offered;
      return offered; // they pass over whole frames; Spark looks at each row again
    }

    @Override
    public Predicate[] pushedPredicates() {
      return predicates;
    }

    @Override
    public Scan build() {
      return new JournalScan(options, wanted, predicates);
    }
  }

  private static final class JournalScan implements Scan, Batch {
    private final Map<String, String> options;
    private final StructType wanted;
    private final Predicate[] predicates;
    private InputPartition[] planned;

    JournalScan(Map<String, String> options, StructType wanted, Predicate[] predicates) {
      this.predicates = predicates;
      this.options = options;
      this.wanted = wanted;
    }

    @Override
    public StructType readSchema() {
      return wanted;
    }

    @Override
    public String description() {
      return "brokerless " + options.getOrDefault("path", options.getOrDefault("endpoint", ""));
    }

    @Override
    public CustomMetric[] supportedCustomMetrics() {
      return ReadMetrics.shown();
    }

    @Override
    public MicroBatchStream toMicroBatchStream(String checkpoint) {
      return new JournalStream(options, wanted);
    }

    @Override
    public Batch toBatch() {
      return this;
    }

    @Override
    public synchronized InputPartition[] planInputPartitions() {
      if (planned == null) { // Spark may ask twice, and both answers have to be the same
        try (Planner planner = new Planner(options)) {
          planned = planner.everything();
        }
      }
      return planned;
    }

    @Override
    public PartitionReaderFactory createReaderFactory() {
      Selection selection = Selection.of(options).with(predicates);
      return new RangeReaderFactory(options, wanted, selection, ReadMetrics.make());
    }
  }
}
