package brokerless.spark;

import java.lang.invoke.MethodHandles;
import java.lang.invoke.VarHandle;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.zip.CRC32;

/** The prefix of a frame. See {@code core/frame.py} for the format. */
final class Frame {
  static final int PREFIX = 16;
  static final int MOST_BYTES = 32 << 20;
  static final int MOST_EVENTS = 65_535;
  private static final VarHandle INT = MethodHandles.byteArrayViewVarHandle(int[].class, ByteOrder.LITTLE_ENDIAN);
  private static final VarHandle LONG = MethodHandles.byteArrayViewVarHandle(long[].class, ByteOrder.LITTLE_ENDIAN);
  private static final VarHandle SHORT = MethodHandles.byteArrayViewVarHandle(short[].class, ByteOrder.LITTLE_ENDIAN);

  private Frame() {}

  static ByteBuffer view(byte[] buffer) {
    return ByteBuffer.wrap(buffer).order(ByteOrder.LITTLE_ENDIAN);
  }

  static int int32(byte[] b, int at) {
    return (int) INT.get(b, at);
  }

  static long int64(byte[] b, int at) {
    return (long) LONG.get(b, at);
  }

  static int u16(byte[] b, int at) {
    return (short) SHORT.get(b, at) & 0xffff;
  }

  /** Length of the frame whose prefix is at {@code at}; -1 if there is none. */
  static int length(byte[] b, int at) {
    long whole = PREFIX + (int32(b, at + 4) & 0xffffffffL) + (int32(b, at + 8) & 0xffffffffL);
    boolean known = b[at] == (byte) 0xb5 && b[at + 1] == 0x1e && b[at + 2] == 1;
    return known && whole <= MOST_BYTES ? (int) whole : -1;
  }

  static void check(byte[] b, int at, int length) throws FallbackException {
    CRC32 crc = new CRC32();
    crc.update(b, at, 12);
    crc.update(b, at + PREFIX, length - PREFIX);
    if ((int) crc.getValue() != int32(b, at + 12)) {
      throw new FallbackException("CRC does not match");
    }
  }
}
