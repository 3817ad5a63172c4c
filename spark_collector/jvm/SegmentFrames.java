package brokerless.spark;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.InvalidPathException;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.Arrays;
import java.util.Locale;
import java.util.Map;
import java.util.zip.CRC32;

/** The records of segment files, read in large blocks. See {@code core/journal/segment.py} for the format. */
final class SegmentFrames implements Frames {
  private static final int SALT = 4;
  // One read call; large enough for sequential speed, small enough to stay in the cache of a server.
  private static final int BLOCK = 2 << 20;
  private static final int HEADER = 8 + 2 + 2 + 4 + 8 + 8 + 4;
  private static final byte[] MAGIC = {'B', 'L', 'S', 'E', 'G', 'M', 'T', 0};

  private final String directory;
  private final byte[] salt;
  private long segment;
  private long position;
  private FileChannel file;
  private byte[] block = new byte[BLOCK];
  private int begin;
  private int end;
  private int at;
  private int length;

  SegmentFrames(RangePartition partition) {
    directory = partition.key();
    salt = partition.salt();
    segment = partition.segment();
    position = partition.position();
  }

  @Override
  public boolean ready() {
    int whole = recordLength();
    return whole > 0 && whole <= end - begin;
  }

  /** Length of the record at {@code begin}; 0 if its prefix is not there yet, negative if it is no record. */
  private int recordLength() {
    if (end - begin < SALT + Frame.PREFIX) {
      return 0;
    }
    if (!Arrays.equals(block, begin, begin + SALT, salt, 0, SALT)) {
      return -1;
    }
    return Frame.length(block, begin + SALT) < 0 ? -1 : SALT + Frame.length(block, begin + SALT);
  }

  @Override
  public boolean advance() throws IOException, FallbackException {
    int whole = recordLength();
    while (whole >= 0 && (whole == 0 || whole > end - begin)) {
      if (!more(Math.max(whole, SALT + Frame.PREFIX))) {
        if (end > begin) {
          throw new FallbackException("a record is cut off");
        }
        nextSegment();
      }
      whole = recordLength();
    }
    if (whole < 0) {
      throw new FallbackException("no record where one should be");
    }
    at = begin + SALT;
    length = whole - SALT;
    begin += whole;
    Frame.check(block, at, length);
    return true;
  }

  /** Read until {@code wanted} bytes are there; false if the file ends before. */
  private boolean more(int wanted) throws IOException, FallbackException {
    if (file == null) {
      file = open(segment);
    }
    int held = end - begin;
    byte[] into = wanted > block.length ? new byte[wanted + BLOCK] : block;
    System.arraycopy(block, begin, into, 0, held);
    block = into;
    begin = 0;
    end = held;
    while (end < wanted) {
      int got = file.read(ByteBuffer.wrap(block, end, block.length - end), position);
      if (got <= 0) {
        return false;
      }
      end += got;
      position += got;
    }
    return true;
  }

  private void nextSegment() throws IOException, FallbackException {
    file.close();
    file = null;
    segment++;
    position = 0;
    if (!more(HEADER + 4)) {
      throw new FallbackException("a segment without a header");
    }
    ByteBuffer head = Frame.view(block);
    int body = head.getInt(begin + HEADER - 4);
    if (!Arrays.equals(block, begin, begin + MAGIC.length, MAGIC, 0, MAGIC.length)
        || head.getShort(begin + 8) != 1
        || body < 0
        || body > Frame.MOST_BYTES
        || head.getLong(begin + 16) != segment
        || !more(HEADER + 4 + body)) {
      throw new FallbackException("a segment's header is damaged");
    }
    CRC32 crc = new CRC32();
    crc.update(block, begin, HEADER);
    crc.update(block, begin + HEADER + 4, body);
    if ((int) crc.getValue() != Frame.view(block).getInt(begin + HEADER)) {
      throw new FallbackException("a segment's header is damaged");
    }
    begin += HEADER + 4 + body;
  }

  private FileChannel open(long number) throws IOException, FallbackException {
    try {
      return FileChannel.open(Path.of(directory, String.format(Locale.ROOT, "%08d.seg", number)), StandardOpenOption.READ);
    } catch (NoSuchFileException error) {
      throw new FallbackException("a segment is gone");
    } catch (InvalidPathException error) {
      throw new FallbackException("a name that Java cannot write in this locale");
    }
  }

  @Override
  public boolean complete() {
    return true;
  }

  @Override
  public String lost() {
    return null;
  }

  @Override
  public byte[] buffer() {
    return block;
  }

  @Override
  public int at() {
    return at;
  }

  @Override
  public int length() {
    return length;
  }

  @Override
  public Frames orElse(RangePartition partition, long next, Map<String, String> options, FallbackException why) {
    return new PythonFrames(partition, next, options, false);
  }

  @Override
  public void close() throws IOException {
    if (file != null) {
      file.close();
    }
  }
}
