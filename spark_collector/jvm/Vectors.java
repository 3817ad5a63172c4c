package brokerless.spark;

import java.util.Arrays;
import java.util.Map;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarArray;
import org.apache.spark.sql.vectorized.ColumnarMap;
import org.apache.spark.unsafe.types.UTF8String;

/** Columns as Spark wants them: views of arrays, nothing is copied into them. No value is ever null. */
abstract class Vectors extends ColumnVector {
  private Vectors(DataType type) {
    super(type);
  }

  /** Make room for so many rows; what is there stays. */
  abstract void grow(int rows);

  /** Copy one row over another. */
  abstract void move(int from, int to);

  static final class Longs extends Vectors {
    long[] values = {};

    Longs(DataType type) {
      super(type);
    }

    @Override
    void grow(int rows) {
      values = Arrays.copyOf(values, rows);
    }

    @Override
    void move(int from, int to) {
      values[to] = values[from];
    }

    @Override
    public long getLong(int row) {
      return values[row];
    }
  }

  static final class Strings extends Vectors {
    UTF8String[] values = {};

    Strings(DataType type) {
      super(type);
    }

    @Override
    void grow(int rows) {
      values = Arrays.copyOf(values, rows);
    }

    @Override
    void move(int from, int to) {
      values[to] = values[from];
    }

    @Override
    public UTF8String getUTF8String(int row) {
      return values[row];
    }
  }

  /** Each value lies somewhere, from a position on. */
  private abstract static class Ranges extends Vectors {
    int[] at = {};
    int[] length = {};

    Ranges(DataType type) {
      super(type);
    }

    @Override
    void grow(int rows) {
      at = Arrays.copyOf(at, rows);
      length = Arrays.copyOf(length, rows);
    }

    @Override
    void move(int from, int to) {
      at[to] = at[from];
      length[to] = length[from];
    }
  }

  static final class Bytes extends Ranges {
    byte[][] buffers = {};

    Bytes(DataType type) {
      super(type);
    }

    @Override
    void grow(int rows) {
      super.grow(rows);
      buffers = Arrays.copyOf(buffers, rows);
    }

    @Override
    void move(int from, int to) {
      super.move(from, to);
      buffers[to] = buffers[from];
    }

    @Override
    public byte[] getBinary(int row) {
      return Arrays.copyOfRange(buffers[row], at[row], at[row] + length[row]);
    }
  }

  /** Maps of strings: the entries of all rows one after the other. */
  static final class Maps extends Ranges {
    static final DataType TYPE = DataTypes.createMapType(DataTypes.StringType, DataTypes.StringType);
    private final Strings names = new Strings(DataTypes.StringType);
    private final Strings values = new Strings(DataTypes.StringType);
    private int entries;

    Maps() {
      super(TYPE);
    }

    void clear() {
      entries = 0;
    }

    void set(int row, Map<UTF8String, UTF8String> map) {
      at[row] = entries;
      length[row] = map.size();
      if (entries + map.size() > names.values.length) {
        int room = Math.max(entries + map.size(), 2 * names.values.length);
        names.grow(room);
        values.grow(room);
      }
      for (Map.Entry<UTF8String, UTF8String> entry : map.entrySet()) {
        names.values[entries] = entry.getKey();
        values.values[entries++] = entry.getValue();
      }
    }

    @Override
    public ColumnarMap getMap(int row) {
      return new ColumnarMap(names, values, length[row] == 0 ? 0 : at[row], length[row]);
    }
  }

  @Override
  public void close() {}

  @Override
  public boolean hasNull() {
    return false;
  }

  @Override
  public int numNulls() {
    return 0;
  }

  @Override
  public boolean isNullAt(int row) {
    return false;
  }

  private UnsupportedOperationException other() {
    return new UnsupportedOperationException("a column of type " + type + " has no such values");
  }

  @Override public boolean getBoolean(int row) { throw other(); }
  @Override public byte getByte(int row) { throw other(); }
  @Override public short getShort(int row) { throw other(); }
  @Override public int getInt(int row) { throw other(); }
  @Override public long getLong(int row) { throw other(); }
  @Override public float getFloat(int row) { throw other(); }
  @Override public double getDouble(int row) { throw other(); }
  @Override public ColumnarArray getArray(int row) { throw other(); }
  @Override public ColumnarMap getMap(int row) { throw other(); }
  @Override public Decimal getDecimal(int row, int precision, int scale) { throw other(); }
  @Override public UTF8String getUTF8String(int row) { throw other(); }
  @Override public byte[] getBinary(int row) { throw other(); }
  @Override public ColumnVector getChild(int ordinal) { throw other(); }
}
