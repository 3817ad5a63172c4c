package brokerless.spark;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.spark.unsafe.types.UTF8String;

/** Frames to rows, whole columns at a time. Refuses what {@code core/frame.py} refuses, and adds nothing then. */
final class FrameReader {
  private static final UTF8String NESTED = UTF8String.fromString("application/vnd.brokerless.frame");
  private static final int MOST_NAME = 255;
  private static final int MOST_HEADERS = 64;
  // From year 1 to 9999, as in rows.py.
  private static final long MIN_TIME = -62_135_596_800_000_000L;
  private static final long MAX_TIME = 253_402_300_799_999_999L;

  private final Rows rows;
  private final Selection selection;
  private long skipped;
  private final Decoded outer = new Decoded();
  private final Decoded inner = new Decoded();
  private long expected = -1;

  FrameReader(Rows rows, Selection selection) {
    this.rows = rows;
    this.selection = selection;
  }

  /** Frames that were passed over since the last call. */
  long takeSkipped() {
    long taken = skipped;
    skipped = 0;
    return taken;
  }

  /**
   * Add the events at outer offsets {@code [first, stop)}; the offset to go on with. With {@code complete}, a gap
   * before the frame is fallback; without, somebody else has seen to it.
   */
  long add(byte[] buffer, int at, int length, long first, long stop, boolean complete) throws FallbackException {
    boolean wanted = outer.read(buffer, at, length, null, selection);
    if (complete && (outer.first > first || (expected >= 0 && outer.first != expected))) {
      throw new FallbackException("offsets are missing");
    }
    int low = (int) Math.max(0, Math.min(outer.count, first - outer.first));
    int high = (int) Math.min(outer.count, stop - outer.first);
    if (low < high) {
      if (outer.holdsFrames()) {
        unnest(low, high);
      } else if (wanted) {
        outer.addTo(rows, selection, low, high, Rows.JOURNAL, Rows.EVENT, -1);
      } else {
        skipped++;
      }
    }
    expected = outer.first + outer.count;
    return Math.max(first, Math.min(stop, expected));
  }

  /** The frames inside a collector's frame; the outer CRC covers them. */
  private void unnest(int low, int high) throws FallbackException {
    byte[] b = outer.buffer;
    for (int n = low; n < high; n++) {
      if (!outer.contentType(n).equals(NESTED)) {
        throw new FallbackException("an event of a spool that holds no frame");
      }
      int at = outer.dataAt[n];
      int length = outer.dataLength[n];
      if (length < Frame.PREFIX || Frame.length(b, at) != length) {
        throw new FallbackException("a frame inside has another length");
      }
      UTF8String topic = outer.topic(n);
      int slash = topic.indexOf(SLASH, 0);
      UTF8String transport = slash < 0 ? topic : topic.substring(0, slash);
      UTF8String kind = slash < 0 ? Rows.NONE : topic.substring(slash + 1, topic.numChars());
      if (inner.read(b, at, length, kind, selection)) {
        inner.addTo(rows, selection, 0, inner.count, transport, kind, Frame.int64(b, outer.timesAt + 8 * n));
      } else {
        skipped++;
      }
    }
  }

  private static final UTF8String SLASH = UTF8String.fromString("/");

  /** One frame, its columns as positions in the buffer. */
  private static final class Decoded {
    private static final UTF8String[] NO_KEYS = {};
    private static final List<Map<UTF8String, UTF8String>> NO_HEADERS = List.of();
    private final Msgpack in = new Msgpack();
    byte[] buffer;
    UTF8String source;
    long epoch;
    long first;
    int count;
    UTF8String[] topics;
    long[] firstSeqs;
    int[] topicCounts;
    UTF8String[] contents;
    UTF8String[] keys = NO_KEYS;
    List<Map<UTF8String, UTF8String>> headers = NO_HEADERS;
    int topicIndexAt; // -1: all events have the first
    int contentIndexAt;
    int timesAt;
    int[] dataAt = {};
    int[] dataLength = {};

    /**
     * Decode a frame of this kind (null: one that may hold frames, or a journal's own). False if nothing in it is wanted;
     * then only what was needed to know that is there.
     */
    boolean read(byte[] b, int at, int length, UTF8String kind, Selection selection) throws FallbackException {
      buffer = b;
      int header = at + Frame.PREFIX;
      int body = header + Frame.int32(b, at + 4);
      if (body < header || body > at + length) {
        throw new FallbackException("a header that is longer than its frame");
      }
      in.open(b, header, body);
      readHeader();
      boolean chosen = kind != null || !holdsFrames();
      if (chosen && !selection.wants(kind == null ? Rows.EVENT : kind, source, topics)) {
        return false;
      }
      in.open(b, body, at + length);
      return readColumns(chosen && selection.hasTimes() ? selection : null);
    }

    private boolean wantsTimes(Selection selection) {
      long oldest = Long.MAX_VALUE;
      long newest = Long.MIN_VALUE;
      for (int n = 0, at = timesAt; n < count; n++, at += 8) {
        long time = Frame.int64(buffer, at);
        oldest = Math.min(oldest, time);
        newest = Math.max(newest, time);
      }
      return selection.wantsTimes(oldest, newest);
    }

    private void readHeader() throws FallbackException {
      int fields = in.array();
      if (fields < 5) {
        throw new FallbackException("a header with too few fields");
      }
      source = in.string();
      epoch = in.number();
      first = in.number();
      long events = in.number();
      if (events < 1 || events > Frame.MOST_EVENTS) {
        throw new FallbackException("a number of events that no frame has");
      }
      count = (int) events;
      readTopics();
      int types = fields > 5 ? in.array() : 0;
      if (types < 0 || types > Frame.MOST_EVENTS) {
        throw new FallbackException("more content types than an index can hold");
      }
      contents = new UTF8String[types];
      for (int n = 0; n < types; n++) {
        contents[n] = in.string();
      }
      in.skip(fields - 6, 0);
      in.finish();
    }

    private void readTopics() throws FallbackException {
      int names = in.array();
      if (names < 1 || names > count) {
        throw new FallbackException("no topics, or more topics than events");
      }
      topics = new UTF8String[names];
      firstSeqs = new long[names];
      topicCounts = new int[names];
      long sum = 0;
      for (int n = 0; n < names; n++) {
        int parts = in.array();
        if (parts != 3) {
          throw new FallbackException("a topic without its numbers");
        }
        topics[n] = in.string();
        firstSeqs[n] = in.number();
        long events = in.number();
        if (events < 1 || events > count || topics[n].numBytes() > MOST_NAME && topics[n].numChars() > MOST_NAME) {
          throw new FallbackException("a topic without events or with too long a name");
        }
        topicCounts[n] = (int) events;
        sum += events;
      }
      if (sum != count) {
        throw new FallbackException("topic counts do not add up");
      }
    }

    private boolean readColumns(Selection timed) throws FallbackException {
      int fields = in.array();
      if (fields < 3) {
        throw new FallbackException("too few columns");
      }
      topicIndexAt = index(topics.length);
      if (in.bytes() != 8 * count) {
        throw new FallbackException("times do not fit");
      }
      timesAt = in.at() - 8 * count;
      if (timed != null && !wantsTimes(timed)) {
        return false;
      }
      readDatas();
      contentIndexAt = -1;
      if (fields > 3) {
        contentIndexAt = index(contents.length);
      } else if (contents.length > 1) {
        throw new FallbackException("content type index is missing");
      }
      keys = NO_KEYS;
      if (fields > 4) {
        int held = in.array();
        if (held != 0 && held != count) {
          throw new FallbackException("keys do not fit");
        }
        keys = held == 0 ? NO_KEYS : new UTF8String[held];
        for (int n = 0; n < held; n++) {
          keys[n] = in.string();
        }
      }
      headers = fields > 5 ? readHeaders() : NO_HEADERS;
      in.skip(fields - 6, 0);
      in.finish();
      checkTopicCounts();
      return true;
    }

    private List<Map<UTF8String, UTF8String>> readHeaders() throws FallbackException {
      int held = in.array();
      if (held == 0) {
        return NO_HEADERS;
      }
      if (held != count) {
        throw new FallbackException("headers do not fit");
      }
      List<Map<UTF8String, UTF8String>> found = new ArrayList<>(held);
      for (int n = 0; n < held; n++) {
        int entries = in.map();
        if (entries == 0) {
          found.add(Map.of());
          continue;
        }
        // A name that comes again has its last value, as in a dict of Python.
        Map<UTF8String, UTF8String> one = new LinkedHashMap<>();
        for (int m = 0; m < entries; m++) {
          one.put(in.string(), in.string());
        }
        if (one.size() > MOST_HEADERS) {
          throw new FallbackException("more headers than an event may have");
        }
        found.add(one);
      }
      return found;
    }

    private int index(int entries) throws FallbackException {
      int length = in.bytes();
      if (length == 0) {
        if (entries > 1) {
          throw new FallbackException("an index is missing");
        }
        return -1;
      }
      if (length != 2 * count) {
        throw new FallbackException("an index does not fit");
      }
      int at = in.at() - length;
      for (int n = 0; n < count; n++) {
        if (Frame.u16(buffer, at + 2 * n) >= entries) {
          throw new FallbackException("an index does not fit");
        }
      }
      return at;
    }

    private void readDatas() throws FallbackException {
      if (in.array() != count) {
        throw new FallbackException("data does not fit");
      }
      if (dataAt.length < count) {
        dataAt = new int[count];
        dataLength = new int[count];
      }
      for (int n = 0; n < count; n++) {
        int length = in.bytes();
        dataLength[n] = length;
        dataAt[n] = in.at() - length;
      }
    }

    private void checkTopicCounts() throws FallbackException {
      if (topicIndexAt < 0) {
        return;
      }
      int[] found = new int[topics.length];
      for (int n = 0; n < count; n++) {
        found[Frame.u16(buffer, topicIndexAt + 2 * n)]++;
      }
      if (!Arrays.equals(found, topicCounts)) {
        throw new FallbackException("topic index does not fit the topic counts");
      }
    }

    boolean holdsFrames() {
      return Arrays.asList(contents).contains(NESTED);
    }

    UTF8String topic(int event) {
      return topics[topicIndexAt < 0 ? 0 : Frame.u16(buffer, topicIndexAt + 2 * event)];
    }

    UTF8String contentType(int event) {
      if (contents.length == 0) {
        return Rows.NONE;
      }
      return contents[contentIndexAt < 0 ? 0 : Frame.u16(buffer, contentIndexAt + 2 * event)];
    }

    /** Events {@code [low, high)} of the frame as rows. {@code stamp} is the time of receipt, -1 without one. */
    void addTo(
        Rows rows, Selection selection, int low, int high, UTF8String transport, UTF8String kind, long stamp) {
      int n = high - low;
      int at = rows.reserve(n);
      int end = at + n;
      Arrays.fill(rows.source.values, at, end, source);
      Arrays.fill(rows.epoch.values, at, end, epoch);
      Arrays.fill(rows.transport.values, at, end, transport);
      Arrays.fill(rows.kind.values, at, end, kind);
      addTopics(rows, low, high, at);
      addContents(rows, low, at, n);
      // A producer's sent counts have its next offset in all its rows.
      long step = kind.equals(Rows.SENT) ? 0 : 1;
      long offset = first + low * step;
      long[] offsets = rows.offset.values;
      long[] times = rows.time.values;
      long[] received = rows.received.values;
      for (int i = at, from = timesAt + 8 * low; i < end; i++, from += 8, offset += step) {
        offsets[i] = offset;
        long time = Math.max(MIN_TIME, Math.min(MAX_TIME, Frame.int64(buffer, from)));
        // A journal read without a collector has no time of receipt: the event was received when it was accepted.
        long when = stamp < 0 ? time : stamp;
        received[i] = when;
        times[i] = time;
      }
      Arrays.fill(rows.data.buffers, at, end, buffer);
      System.arraycopy(dataAt, low, rows.data.at, at, n);
      System.arraycopy(dataLength, low, rows.data.length, at, n);
      if (keys.length == 0) {
        Arrays.fill(rows.key.values, at, end, Rows.NONE);
      } else {
        System.arraycopy(keys, low, rows.key.values, at, n);
      }
      if (headers.isEmpty()) {
        Arrays.fill(rows.headers.length, at, end, 0);
      } else {
        for (int i = 0; i < n; i++) {
          rows.headers.set(at + i, headers.get(low + i));
        }
      }
      rows.added(wantedOf(rows, selection, at, n));
    }

    /** Drop the rows from {@code at} on whose topic is not wanted; how many of {@code n} are left. */
    private int wantedOf(Rows rows, Selection selection, int at, int n) {
      boolean all = true;
      for (UTF8String topic : topics) {
        all &= selection.wantsTopic(topic);
      }
      if (all) {
        return n;
      }
      int to = at;
      for (int from = at; from < at + n; from++) {
        if (selection.wantsTopic(rows.topic.values[from])) {
          rows.move(from, to++);
        }
      }
      return to - at;
    }

    private void addTopics(Rows rows, int low, int high, int at) {
      UTF8String[] names = rows.topic.values;
      long[] seqs = rows.seq.values;
      if (topicIndexAt < 0) {
        Arrays.fill(names, at, at + high - low, topics[0]);
        long seq = firstSeqs[0] + low;
        for (int i = at, end = at + high - low; i < end; i++) {
          seqs[i] = seq++;
        }
        return;
      }
      long[] next = firstSeqs.clone();
      for (int event = 0; event < high; event++) {
        int topic = Frame.u16(buffer, topicIndexAt + 2 * event);
        long seq = next[topic]++;
        if (event >= low) {
          names[at + event - low] = topics[topic];
          seqs[at + event - low] = seq;
        }
      }
    }

    private void addContents(Rows rows, int low, int at, int n) {
      UTF8String[] values = rows.contentType.values;
      if (contentIndexAt < 0) {
        Arrays.fill(values, at, at + n, contents.length == 0 ? Rows.NONE : contents[0]);
        return;
      }
      for (int i = 0; i < n; i++) {
        values[at + i] = contents[Frame.u16(buffer, contentIndexAt + 2 * (low + i))];
      }
    }
  }
}
