package brokerless.spark;

import org.apache.spark.unsafe.types.UTF8String;

/** Reads the few kinds of msgpack values that frames are made of; every length is checked before it is used. */
final class Msgpack {
  // Numbers that 62 bits cannot hold are refused, as everywhere in this package.
  private static final long NUMBERS = 1L << 62;
  private static final int MOST_DEPTH = 16;

  private byte[] b;
  private int at;
  private int end;

  void open(byte[] buffer, int from, int to) {
    b = buffer;
    at = from;
    end = to;
  }

  /** Where the value that was read last ends. */
  int at() {
    return at;
  }

  void finish() throws FallbackException {
    if (at != end) {
      throw new FallbackException("bytes after the end");
    }
  }

  private int take(int bytes) throws FallbackException {
    if (bytes < 0 || bytes > end - at) {
      throw new FallbackException("a value is cut off");
    }
    int from = at;
    at += bytes;
    return from;
  }

  private int u8() throws FallbackException {
    return b[take(1)] & 0xff;
  }

  private int big(int bytes) throws FallbackException {
    int value = 0;
    for (int from = take(bytes), n = 0; n < bytes; n++) {
      value = value << 8 | b[from + n] & 0xff;
    }
    return value; // a length of 2 GB and more is negative, and refused by take()
  }

  long number() throws FallbackException {
    int first = u8();
    if (first < 0x80) {
      return first;
    }
    int bytes = switch (first) {
      case 0xcc -> 1;
      case 0xcd -> 2;
      case 0xce -> 4;
      case 0xcf -> 8;
      default -> throw new FallbackException("not a number, or a negative one");
    };
    long value = 0;
    for (int from = take(bytes), n = 0; n < bytes; n++) {
      value = value << 8 | b[from + n] & 0xff;
    }
    if (value < 0 || value >= NUMBERS) {
      throw new FallbackException("a number out of range");
    }
    return value;
  }

  int array() throws FallbackException {
    int first = u8();
    if (first >> 4 == 9) {
      return first & 15;
    }
    return switch (first) {
      case 0xdc -> big(2);
      case 0xdd -> big(4);
      default -> throw new FallbackException("not an array");
    };
  }

  /** The number of entries of a map. */
  int map() throws FallbackException {
    int first = u8();
    if (first >> 4 == 8) {
      return first & 15;
    }
    return switch (first) {
      case 0xde -> big(2);
      case 0xdf -> most(big(4));
      default -> throw new FallbackException("not a map");
    };
  }

  /** The length of a string, which then begins at {@link #at}. */
  private int stringLength() throws FallbackException {
    int first = u8();
    if (first >> 5 == 5) {
      return first & 31;
    }
    return switch (first) {
      case 0xd9 -> big(1);
      case 0xda -> big(2);
      case 0xdb -> big(4);
      default -> throw new FallbackException("not a string");
    };
  }

  /** A string; it refers to the buffer. */
  UTF8String string() throws FallbackException {
    int length = stringLength();
    UTF8String found = UTF8String.fromBytes(b, take(length), length);
    if (!found.isValid()) {
      throw new FallbackException("a string that is not UTF-8");
    }
    return found;
  }

  /** The length of a bytes value; {@link #at} is behind it. */
  int bytes() throws FallbackException {
    int length = switch (u8()) {
      case 0xc4 -> b[take(1)] & 0xff;
      case 0xc5 -> big(2);
      case 0xc6 -> big(4);
      default -> throw new FallbackException("not bytes");
    };
    take(length);
    return length;
  }

  /** A number of entries or bytes, if there can be so many. */
  private int most(int announced) throws FallbackException {
    if (announced < 0 || announced > end - at) {
      throw new FallbackException("a value is cut off");
    }
    return announced;
  }

  /** Pass over entries of an array that a newer version may have. */
  void skip(int values, int depth) throws FallbackException {
    if (depth > MOST_DEPTH) {
      throw new FallbackException("nested too deeply");
    }
    for (int n = 0; n < values; n++) {
      int first = u8();
      if (first >= 0x80 && first < 0x90) {
        skip(2 * (first & 15), depth + 1);
      } else if (first >= 0x90 && first < 0xa0) {
        skip(first & 15, depth + 1);
      } else if (first >= 0xa0 && first < 0xc0) {
        take(first & 31);
      } else if (first >= 0xc0 && first < 0xe0) {
        switch (first) {
          case 0xc0, 0xc2, 0xc3 -> { }
          case 0xc4, 0xd9 -> take(big(1));
          case 0xc5, 0xda -> take(big(2));
          case 0xc6, 0xdb -> take(big(4));
          case 0xcc, 0xd0 -> take(1);
          case 0xcd, 0xd1 -> take(2);
          case 0xca, 0xce, 0xd2 -> take(4);
          case 0xcb, 0xcf, 0xd3 -> take(8);
          case 0xd4, 0xd5, 0xd6, 0xd7, 0xd8 -> take(1 + (1 << first - 0xd4));
          case 0xc7 -> take(1 + big(1));
          case 0xc8 -> take(1 + big(2));
          case 0xc9 -> take(1 + most(big(4)));
          case 0xdc -> skip(big(2), depth + 1);
          case 0xdd -> skip(most(big(4)), depth + 1);
          case 0xde -> skip(2 * big(2), depth + 1);
          case 0xdf -> skip(2 * most(big(4)), depth + 1);
          default -> throw new FallbackException("a kind of value that frames do not have");
        }
      }
    }
  }
}
