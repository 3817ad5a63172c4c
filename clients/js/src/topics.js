// Which topics are wanted: chapter "Topics" of wire-protocol.md.

/** A function that says whether a topic matches one of the entries; no entry matches every topic. */
export function topicFilter(entries) {
  if (!entries.length) return () => true;
  const tests = entries.map(one);
  const known = new Map();
  return (topic) => {
    let wanted = known.get(topic);
    if (wanted === undefined) {
      if (known.size >= 65_536) known.clear();
      wanted = tests.some((matches) => matches(topic));
      known.set(topic, wanted);
    }
    return wanted;
  };
}

function one(entry) {
  const marked = entry.startsWith("prefix:");
  if (marked || entry.endsWith(".")) {
    const prefix = marked ? entry.slice("prefix:".length) : entry;
    return (topic) => topic.startsWith(prefix);
  }
  const pattern = entry.split(".");
  return (topic) => match(pattern, topic.split("."));
}

/** Whether the words match. The set of positions that are possible so far bounds the time, whatever the pattern. */
function match(pattern, words) {
  let positions = skip(pattern, new Set([0]));
  for (const word of words) {
    const following = new Set();
    for (const at of positions) {
      if (pattern[at] === "**") following.add(at);
      else if (at < pattern.length && matchWord(pattern[at], word)) following.add(at + 1);
    }
    positions = skip(pattern, following);
  }
  return positions.has(pattern.length);
}

/** Also the positions after `**`, which may stand for nothing. */
function skip(pattern, positions) {
  for (const at of positions) if (pattern[at] === "**") positions.add(at + 1);
  return positions;
}

function matchWord(pattern, word) {
  const [first, ...rest] = pattern.split("*");
  if (!rest.length) return pattern === word;
  const last = rest.pop();
  if (word.length < first.length + last.length || !word.startsWith(first) || !word.endsWith(last)) return false;
  const end = word.length - last.length;
  let at = first.length;
  for (const part of rest) {
    const found = word.indexOf(part, at);
    if (found < 0 || found + part.length > end) return false;
    at = found + part.length;
  }
  return true;
}
