package brokerless.spark;

import java.util.Map;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.sources.DataSourceRegister;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * {@code format("brokerless")} inside the JVM: what is read and in which order is decided by the planner in Python
 * ({@code spark_collector/source/planning.py}), the same one that the data source in Python uses; here frames become columns.
 */
public final class Provider implements TableProvider, DataSourceRegister {
  @Override
  public String shortName() {
    return "brokerless";
  }

  @Override
  public StructType inferSchema(CaseInsensitiveStringMap options) {
    return Rows.SCHEMA;
  }

  @Override
  public Table getTable(StructType schema, Transform[] partitioning, Map<String, String> properties) {
    return new JournalTable();
  }
}
