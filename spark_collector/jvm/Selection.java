package brokerless.spark;

import java.io.Serializable;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.regex.Pattern;
import org.apache.spark.sql.connector.expressions.Expression;
import org.apache.spark.sql.connector.expressions.Literal;
import org.apache.spark.sql.connector.expressions.NamedReference;
import org.apache.spark.sql.connector.expressions.filter.Predicate;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * Which frames and rows are wanted: by the options, as {@code spark_collector/source/selection.py} says, and by the
 * filters of a batch query, which pass over whole frames.
 */
final class Selection implements Serializable {
  private static final int MOST_REMEMBERED = 100_000;

  private final Names topics;
  private final Names sources;
  private final List<Condition> conditions;

  private Selection(Names topics, Names sources, List<Condition> conditions) {
    this.topics = topics;
    this.sources = sources;
    this.conditions = conditions;
  }

  /** What the options want. They were checked by the planner. */
  static Selection of(Map<String, String> options) {
    Map<String, String> lower = new HashMap<>();
    options.forEach((key, value) -> lower.put(key.toLowerCase(java.util.Locale.ROOT), value));
    return new Selection(
        new Names(lower.get("subscribe"), lower.get("subscribepattern")),
        new Names(lower.get("sources"), lower.get("sourcespattern")),
        List.of());
  }

  /** The same, and what these filters of Spark pass over. Spark evaluates them again, row by row. */
  Selection with(Predicate[] predicates) {
    List<Condition> found = new ArrayList<>();
    for (Predicate predicate : predicates) {
      Condition condition = Condition.of(predicate);
      if (condition != null) {
        found.add(condition);
      }
    }
    return new Selection(topics, sources, found);
  }

  boolean isAll() {
    return topics.all() && sources.all() && conditions.isEmpty();
  }

  boolean wantsTopic(UTF8String topic) {
    return topic.numBytes() == 0 || topics.wants(topic);
  }

  /** Whether a frame with these names may hold a wanted row. */
  boolean wants(UTF8String kind, UTF8String source, UTF8String[] names) {
    if (isAll()) {
      return true;
    }
    if (!sources.wants(source)) {
      return false;
    }
    List<UTF8String> wanted = new ArrayList<>();
    for (UTF8String name : names) {
      if (wantsTopic(name)) {
        wanted.add(name);
      }
    }
    if (wanted.isEmpty()) {
      return false;
    }
    for (Condition condition : conditions) {
      boolean holds = switch (condition.column) {
        case "source" -> condition.holds(source);
        case "kind" -> condition.holds(kind);
        case "topic" -> wanted.stream().anyMatch(condition::holds);
        default -> true;
      };
      if (!holds) {
        return false;
      }
    }
    return true;
  }

  boolean hasTimes() {
    return conditions.stream().anyMatch(condition -> condition.column.equals("time"));
  }

  /** Whether events from {@code oldest} to {@code newest} may be wanted. */
  boolean wantsTimes(long oldest, long newest) {
    return conditions.stream().allMatch(
        condition -> !condition.column.equals("time") || oldest <= condition.most && newest >= condition.least);
  }

  /** Names that are listed, match a pattern, or both; without either, all. */
  private static final class Names implements Serializable {
    private final HashSet<String> listed;
    private final Pattern pattern;
    private transient Map<UTF8String, Boolean> known;

    Names(String list, String pattern) {
      this.listed = list == null ? null : new HashSet<>(Arrays.stream(list.split(",")).map(String::strip).toList());
      this.pattern = pattern == null || pattern.isEmpty() ? null : Pattern.compile(pattern, Pattern.DOTALL);
    }

    boolean all() {
      return listed == null && pattern == null;
    }

    boolean wants(UTF8String name) {
      if (all()) {
        return true;
      }
      if (known == null || known.size() > MOST_REMEMBERED) {
        known = new HashMap<>();
      }
      Boolean found = known.get(name);
      if (found == null) {
        String text = name.toString();
        found = (listed == null || listed.contains(text)) && (pattern == null || pattern.matcher(text).matches());
        known.put(name.copy(), found);
      }
      return found;
    }
  }

  /** A comparison of one column with constants. */
  private static final class Condition implements Serializable {
    final String column;
    private final HashSet<String> names;
    private final String prefix;
    final long least;
    final long most;

    private Condition(String column, Set<String> names, String prefix, long least, long most) {
      this.column = column;
      this.names = names == null ? null : new HashSet<>(names);
      this.prefix = prefix;
      this.least = least;
      this.most = most;
    }

    boolean holds(UTF8String name) {
      return names != null ? names.contains(name.toString()) : name.toString().startsWith(prefix);
    }

    /** Null if it does not help to pass over frames. */
    static Condition of(Predicate predicate) {
      Expression[] parts = predicate.children();
      if (parts.length < 2 || !(parts[0] instanceof NamedReference named) || named.fieldNames().length != 1) {
        return null;
      }
      List<Object> values = new ArrayList<>();
      for (int n = 1; n < parts.length; n++) {
        if (!(parts[n] instanceof Literal<?> literal) || literal.value() == null) {
          return null;
        }
        values.add(literal.value());
      }
      String column = named.fieldNames()[0];
      return switch (column) {
        case "source", "topic", "kind" -> named(column, predicate.name(), values);
        case "time" -> timed(predicate.name(), values);
        default -> null;
      };
    }

    private static Condition named(String column, String operator, List<Object> values) {
      if (!values.stream().allMatch(value -> value instanceof UTF8String)) {
        return null;
      }
      Set<String> names = new HashSet<>(values.stream().map(Object::toString).toList());
      return switch (operator) {
        case "=", "IN" -> new Condition(column, names, null, 0, 0);
        case "STARTS_WITH" -> new Condition(column, null, names.iterator().next(), 0, 0);
        default -> null;
      };
    }

    private static Condition timed(String operator, List<Object> values) {
      if (!(values.get(0) instanceof Long time)) {
        return null;
      }
      return switch (operator) {
        case "=" -> new Condition("time", null, null, time, time);
        case ">", ">=" -> new Condition("time", null, null, time, Long.MAX_VALUE);
        case "<", "<=" -> new Condition("time", null, null, Long.MIN_VALUE, time);
        default -> null;
      };
    }
  }
}
