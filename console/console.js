// The console's page: draws what /events sends, and keeps nothing else. All text is set as text, never as HTML.
"use strict";

const byId = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en", {maximumFractionDigits: 0});
const small = new Intl.NumberFormat("en", {maximumFractionDigits: 1});
const opened = new Set();  // ids of cards that the reader has opened
const histories = new Map();  // id → [[time, rate, lag, lost]]
const HISTORY_S = 300;
const COLUMNS = [
  ["Producers", (kind) => kind.endsWith(".publisher")],
  ["Transports", (kind) => ["multicast.request_server", "webhooks.dispatcher", "metrics.server"].includes(kind)],
  ["Consumers", (kind) => /\.(subscriber|worker|mirror)$/.test(kind)],
  ["Collectors", (kind) => kind === "collector"],
  ["Spark", (kind) => kind === "spark.job"],
];
const BEHIND = 1000;  // events; a line with more lag is drawn as trouble

function element(name, options = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(options)) {
    if (key === "text") made.textContent = value;
    else if (key === "class") made.className = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function svg(name, options = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(options)) {
    if (key === "text") made.textContent = value;
    else made.setAttribute(key, value);
  }
  return made;
}

// Makes `old` look like `fresh` and keeps every node that can stay, so that focus, selection and scrolling survive.
function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName
      || old.dataset?.id !== fresh.dataset?.id) return old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return undefined;
  }
  for (const {name} of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const {name, value} of [...fresh.attributes]) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  show(old, [...fresh.childNodes]);
  return undefined;
}

function show(parent, children) {
  while (parent.childNodes.length > children.length) parent.lastChild.remove();
  children.forEach((child, index) => {
    const old = parent.childNodes[index];
    if (old) morph(old, child);
    else parent.append(child);
  });
}

const amount = (value) => (value === null || value === undefined ? "–" : number.format(value));
const rate = (value) => (value === null || value === undefined ? "–" : `${(value < 10 ? small : number).format(value)}/s`);
const clock = (seconds) => new Date(seconds * 1000).toISOString().slice(11, 19);
const title = (component) => component.name || component.addresses[0] || component.kind;

function table(columns, rows, none) {
  if (!rows.length) return element("p", {class: "none", text: none});
  const head = element("tr");
  for (const [text, kind] of columns) head.append(element("th", {text, class: kind || "", scope: "col"}));
  const body = element("tbody");
  for (const row of rows) {
    const line = element("tr");
    row.forEach((value, index) => {
      const cell = value instanceof Node ? element("td", {class: columns[index][1] || ""}, value)
        : element("td", {class: columns[index][1] || "", text: value});
      line.append(cell);
    });
    body.append(line);
  }
  return element("div", {class: "scroll", tabindex: "0"}, element("table", {}, element("thead", {}, head), body));
}

function verdict(good) {
  if (good === null || good === undefined) return element("span", {text: "–"});
  return element("span", {class: good ? "good" : "bad", text: good ? "balanced" : "DOES NOT BALANCE"});
}

function card(component, sources) {
  const classes = ["card", component.status];
  if (component.lost) classes.push("lossy");
  const made = element("details", {class: classes.join(" "), "data-id": component.id, "data-kind": component.kind});
  if (opened.has(component.id)) made.setAttribute("open", "");
  const figures = `${rate(component.rate)} · lag ${amount(component.lag)} · lost ${amount(component.lost)}`;
  const head = element("summary", {},
    element("span", {class: "name", text: title(component)}),
    element("span", {class: "status", text: component.status}),
    element("span", {class: "kind", text: `${component.kind} · pid ${component.pid}`}),
    element("span", {class: "figures", text: figures}));
  if (sources.length) head.append(element("span", {class: "from", text: `from ${sources.map(title).join(", ")}`}));
  head.append(sparkline(histories.get(component.id) || [], 1));
  made.append(head);
  if (!opened.has(component.id)) return made;
  const facts = element("dl");
  const shown = {
    started: new Date(component.started * 1000).toISOString().slice(0, 19) + "Z", host: component.host,
    version: component.version, addresses: component.addresses.join(" "), ...component.state.counters,
  };
  for (const [name, value] of Object.entries(shown)) {
    const text = typeof value === "number" ? number.format(value) : String(value);
    facts.append(element("dt", {text: name}), element("dd", {text}));
  }
  made.append(facts);
  return made;
}

function sparkline(points, index) {
  const picture = svg("svg", {viewBox: "0 0 100 20", preserveAspectRatio: "none", "aria-hidden": "true"});
  if (points.length > 1) {
    const most = Math.max(1, ...points.map((p) => p[index]));
    const [from, to] = [points[0][0], points[points.length - 1][0]];
    const x = (p) => ((100 * (p[0] - from)) / Math.max(1e-9, to - from)).toFixed(1);
    picture.append(svg("polyline", {points: points.map((p) => `${x(p)},${(19 - (18 * p[index]) / most).toFixed(1)}`).join(" ")}));
  }
  return picture;
}

function wanted(component) {
  const text = byId("filter").value.trim().toLowerCase();
  const trouble = component.status === "dead" || component.lost > 0 || component.lag > BEHIND || component.balanced === false;
  if (byId("trouble").checked && !trouble) return false;
  return !text || `${component.kind} ${component.name} ${component.host} ${component.addresses.join(" ")} ${component.pid}`
    .toLowerCase().includes(text);
}

function drawMap(data) {
  byId("empty").hidden = data.components.length > 0;
  const byKey = new Map(data.components.map((c) => [c.id, c]));
  const sources = new Map();
  for (const {from, to} of data.edges) if (byKey.has(from)) sources.set(to, [...(sources.get(to) || []), byKey.get(from)]);
  const columns = [];
  for (const [name, belongs] of COLUMNS) {
    const all = data.components.filter((c) => belongs(c.kind));
    const cards = all.filter(wanted).map((c) => card(c, sources.get(c.id) || []));
    if (!all.length) continue;
    const count = cards.length === all.length ? amount(all.length) : `${amount(cards.length)} of ${amount(all.length)}`;
    const content = [element("h3", {text: `${name} (${count})`}), ...cards];
    // Where nobody announced feeds a transport, a column of its own would stand in the way of others' lines.
    if (columns.length === 1 && name === "Transports" && !all.some((c) => sources.has(c.id))) columns[0].append(...content);
    else columns.push(element("div", {class: "column", "data-id": name}, ...content));
  }
  show(byId("columns"), columns);
  drawEdges(data, byKey);
}

function drawEdges(data, byKey) {
  const area = byId("map").getBoundingClientRect();
  const places = new Map();
  for (const node of document.querySelectorAll("#columns .card")) places.set(node.dataset.id, node.getBoundingClientRect());
  const paths = [], texts = [], taken = [];
  for (const edge of data.edges) {
    const [start, end, consumer] = [places.get(edge.from), places.get(edge.to), byKey.get(edge.to)];
    if (!start || !end || !consumer) continue;
    const x1 = start.right - area.left, y1 = start.top + 22 - area.top;
    const x2 = end.left - area.left, y2 = end.top + 22 - area.top;
    if (x2 <= x1) continue;
    const middle = x2 - Math.min(75, (x2 - x1) / 2);
    const state = consumer.status === "dead" || edge.lag > BEHIND ? "behind" : edge.rate > 0 ? "flowing" : "";
    paths.push(svg("path", {
      d: `M${x1},${y1} C${middle},${y1} ${middle},${y2} ${x2},${y2}`, class: state,
      "data-edge": `${byKey.get(edge.from).kind} ${consumer.kind}`, "data-rate": edge.rate ?? "", "data-lag": edge.lag ?? "",
    }));
    const said = [edge.rate === null ? edge.transport : `${edge.transport} ${rate(edge.rate)}`];
    if (edge.lag) said.push(`lag ${amount(edge.lag)}`);
    let y = y2 - 6;
    while (taken.some(([tx, ty]) => Math.abs(tx - x2) < 60 && Math.abs(ty - y) < 26)) y += 26;
    taken.push([x2, y]);
    said.forEach((text, line) => texts.push(svg("text", {x: x2 - 8, y: y + 12 * line - (said.length > 1 ? 8 : 0), text})));
  }
  show(byId("edges"), [...paths, ...texts]);
}

function drawIncidents(data) {
  const rows = data.incidents.map((each) => {
    const state = each.state === "repaired" && each.lost ? `repaired, ${amount(each.lost)} lost` : each.state;
    const good = each.state === "repaired" && !each.lost;
    return [clock(each.time), each.source, each.reason,
      each.first === null || each.last < each.first ? "–" : `${amount(each.first)} to ${amount(each.last)}`,
      amount(each.count), element("span", {class: good ? "good" : "bad", text: state}), each.by];
  });
  show(byId("losses"), [table(
    [["time (UTC)"], ["source"], ["reason"], ["offsets", "number"], ["events", "number"], ["state", "state"], ["noticed by", "wide"]],
    rows, "Nothing was lost, missing or killed in the last minutes.")]);
}

function drawAccounting(data) {
  const rows = [];
  const reasons = (account) => [...Object.entries(account.lost_by_reason || {}), ["compacted", account.compacted]].filter(([, n]) => n)
    .map(([reason, n]) => `${reason} ${amount(n)}`).join(", ");
  for (const component of data.components) {
    const account = component.state.account;
    if (account) rows.push([`${component.kind} ${title(component)}`, amount(account.accepted), amount(account.delivered),
      amount(account.pending), amount(account.lost), reasons(account), verdict(account.balanced)]);
    const streams = component.state.streams || [];
    for (const [source, epoch, topic, accepted, delivered, pending, lost, balanced] of streams) {
      const several = streams.some((other) => other[0] === source && other[2] === topic && other[1] !== epoch);
      rows.push([element("span", {class: "stream", text: [source, topic, several && `epoch ${epoch}`].filter(Boolean).join(" · ")}),
        amount(accepted), amount(delivered), amount(pending), amount(lost), "", verdict(balanced)]);
    }
    for (const group of Object.values(component.state.groups || {})) {
      rows.push([`group ${group.name} of ${component.name}`, amount(group.offered), amount(group.acked + group.skipped),
        amount(group.pending), amount(group.lost + group.dead_lettered), reasons(group), verdict(group.balanced)]);
    }
  }
  show(byId("accounting"), [table(
    [["stream", "wide"], ["accepted", "number"], ["delivered", "number"], ["pending", "number"], ["lost", "number"],
      ["reasons", "wide"], ["sum", "state"]], rows, "No consumer is announced.")]);
}

function drawJournals(data) {
  const rows = [];
  const byKey = new Map(data.components.map((c) => [c.id, c]));
  for (const component of data.components) {
    const journal = component.state.journal;
    if (!journal) continue;
    const limits = Object.entries(journal.retention).filter(([, v]) => v).map(([k, v]) => `${k} ${amount(v)}`).join(", ");
    const lags = new Map(Object.entries(journal.behind).filter(([, n]) => n > 0));  // those that the journal knows by name
    for (const edge of data.edges.filter((e) => e.from === component.id && e.lag > 0)) {
      const consumer = byKey.get(edge.to);  // and those that keep their position themselves
      if (!consumer || !/\.(subscriber|mirror)$/.test(consumer.kind) || lags.has(title(consumer))) continue;
      if (consumer.status === "dead" || edge.lag > BEHIND) lags.set(title(consumer), edge.lag);
    }
    const behind = [...lags].sort((a, b) => b[1] - a[1]).slice(0, 5).map(([name, n]) => `${name} ${amount(n)}`).join(", ");
    rows.push([component.name, journal.kind, amount(component.state.oldest), amount(component.state.next),
      amount(component.state.next - component.state.oldest), limits || "none", journal.on_full,
      amount(journal.counters.evicted), behind || "nobody"]);
  }
  show(byId("journals"), [table(
    [["source"], ["journal"], ["oldest", "number"], ["next", "number"], ["events", "number"], ["retention", "wide"],
      ["when full"], ["evicted", "number"], ["behind", "wide"]], rows, "No journal is announced.")]);
}

function deadLetters(component, group) {
  const text = amount(group.dead_lettered);
  if (!group.dead_lettered || !settings.dead_letters) return text;
  return element("button", {type: "button", class: "letters", "data-source": component.name, "data-group": group.name, text: `${text}: look`});
}

function drawGroups(data) {
  const rows = [];
  for (const component of data.components) {
    for (const group of Object.values(component.state.groups || {})) {
      rows.push([group.name, component.name, amount(group.workers), amount(group.leased), amount(group.waiting),
        amount(group.redelivered), deadLetters(component, group), amount(group.lost)]);
    }
  }
  show(byId("groups"), [table(
    [["group"], ["source"], ["workers", "number"], ["leased", "number"], ["waiting", "number"],
      ["redelivered", "number"], ["dead letters", "number"], ["lost", "number"]], rows, "No group is announced.")]);
}

function drawWebhooks(data) {
  const rows = [];
  for (const component of data.components.filter((c) => c.kind === "webhooks.dispatcher")) {
    const counters = component.state.counters || {};
    rows.push([component.name, amount(component.state.pending), amount(counters.delivered), amount(counters.gave_up),
      amount(counters.evicted), component.state.delivering ? "delivers" : "stands by", component.state.trouble || "–"]);
    for (const [id, tenant, url, state, failing, pending] of component.state.endpoints || []) {
      rows.push([element("span", {class: "stream", text: `${url} · ${tenant} · ${id}`}), amount(pending), "", "", "",
        element("span", {class: state === "active" && !failing ? "good" : "bad", text: failing && state === "active" ? "failing" : state}),
        failing ? `since ${clock(failing / 1e6)} UTC` : "–"]);
    }
  }
  show(byId("webhooks"), [table(
    [["dispatcher or endpoint", "wide"], ["pending", "number"], ["delivered", "number"], ["gave up", "number"],
      ["evicted", "number"], ["state"], ["trouble", "wide"]], rows, "No dispatcher is announced.")]);
}

function drawCounters(data) {
  const rows = [];
  for (const component of data.components.filter((c) => c.kind === "metrics.server")) {
    for (const [name, point] of Object.entries(component.state.series || {})) {
      rows.push([name, small.format(point.raw), small.format(point.corrected),
        point.bound === null ? "?" : `± ${small.format(point.bound)}`, point.grade, small.format(point.total)]);
    }
  }
  show(byId("counters"), [table(
    [["counter", "wide"], ["raw", "number"], ["corrected", "number"], ["bound", "number"], ["grade"], ["total", "number"]],
    rows, "No metrics daemon is announced.")]);
}

function drawRuns(data) {
  const rows = [];
  for (const component of data.components.filter((c) => c.kind === "losstest.run")) {
    const {done, planned} = component.state.counters || {};
    const now = component.status === "up" ? (component.state.running || []).slice(0, 5).join(", ") : "ended";
    rows.push([component.name, `${amount(done)} of ${amount(planned)} runs`, "", "", "", now]);
    for (const [transport, scenario, accepted, lost, reasons, result] of [...(component.state.rows || [])].reverse()) {
      rows.push([element("span", {class: "stream", text: transport}), scenario, amount(accepted), amount(lost),
        Object.entries(reasons).filter(([, n]) => n).map(([reason, n]) => `${reason} ${amount(n)}`).join(", "),
        element("span", {class: result === "pass" ? "good" : "bad", text: result})]);
    }
  }
  show(byId("runs"), [table([["run or transport", "wide"], ["scenario"], ["accepted", "number"], ["lost", "number"],
    ["reasons", "wide"], ["verdict", "wide"]], rows, "No loss test is running: brokerless losstest run --quick")]);
}

function drawTotals(data) {
  const total = (field, belongs) => data.components.filter(belongs).reduce((sum, c) => sum + (c[field] || 0), 0);
  const groups = data.components.flatMap((c) => Object.values(c.state.groups || {}));
  const inGroups = groups.reduce((sum, group) => sum + group.lost, 0);
  const facts = {
    components: number.format(data.components.length),
    published: rate(total("rate", (c) => c.kind.endsWith(".publisher"))),
    delivered: rate(total("rate", (c) => /subscriber|worker/.test(c.kind))),
    lost: number.format(total("lost", (c) => /subscriber|dispatcher|metrics/.test(c.kind)) + inGroups),
    dead: number.format(data.components.filter((c) => c.status === "dead").length),
  };
  show(byId("totals"), Object.entries(facts).map(([name, value]) => element("div", {},
    element("dt", {text: name}),
    element("dd", {text: value, class: (name === "dead" || name === "lost") && value !== "0" ? "bad" : ""}))));
}

let latest = null;
let settings = {dead_letters: false, history: false};

function remember(data) {
  const ids = new Set();
  for (const component of data.components) {
    ids.add(component.id);
    const points = component.history.length ? component.history : histories.get(component.id) || [];
    const last = points[points.length - 1];
    if (component.point.length && (!last || component.point[0] > last[0])) points.push(component.point);
    histories.set(component.id, points.filter((p) => p[0] > data.time - HISTORY_S));
  }
  for (const id of [...histories.keys()]) if (!ids.has(id)) histories.delete(id);
}

function draw(data) {
  latest = data;
  remember(data);
  drawTotals(data);
  drawMap(data);
  for (const section of [drawIncidents, drawAccounting, drawJournals, drawGroups, drawWebhooks, drawCounters, drawRuns]) section(data);
  const said = byId("connection");
  said.textContent = `live, ${clock(data.time)} UTC`;
  said.className = "";
  document.body.dataset.updated = data.time;
}

const token = new URLSearchParams(location.search).get("token");
const address = (path, words = {}) => `${path}?${new URLSearchParams(token ? {...words, token} : words)}`;

async function ask(path, words, method = "GET") {
  const answer = await fetch(address(path, words), {method});
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error);
  return content;
}

// ---- hours of history, from Prometheus ----
async function drawHistory() {
  const hours = byId("hours").value;
  try {
    const rows = (await ask("history", {hours})).map((each) => {
      const last = (points) => (points?.length ? points[points.length - 1][1] : null);
      return [`${each.kind} ${each.name}`, sparkline(each.rate || [], 1), rate(last(each.rate)), sparkline(each.lag || [], 1),
        amount(last(each.lag)), amount(last(each.lost))];
    });
    show(byId("past"), [table([["component", "wide"], ["rate", "chart"], ["now", "number"], ["lag", "chart"], ["now", "number"],
      ["lost", "number"]], rows, "Prometheus has nothing of brokerless in this time.")]);
  } catch (error) {
    show(byId("past"), [element("p", {class: "bad", text: error.message})]);
  }
}

// ---- dead letters ----
async function showLetters(words, method) {
  byId("letters-title").textContent = `Dead letters of group ${words.group}, source ${words.source}`;
  if (!byId("letters").open) byId("letters").showModal();
  try {
    const letters = await ask("dead-letters", words, method);
    show(byId("letters-list"), letters.length ? letters.map((letter) => element("details", {class: "letter", "data-id": letter.number},
      element("summary", {text: `${letter.topic} · ${letter.id} · ${letter.time} · ${letter.attempts} attempts`}),
      element("p", {class: "hint", text: `${letter.content_type || "no content type"} · ${amount(letter.bytes)} bytes · ${letter.encoding}${letter.key ? ` · key ${letter.key}` : ""}`}),
      element("pre", {text: letter.data, tabindex: "0"}),
      element("button", {type: "button", class: "again", "data-source": words.source, "data-group": words.group,
        "data-number": letter.number, text: `Send again to group ${words.group}`}))) : [element("p", {text: "None is left."})]);
  } catch (error) {
    show(byId("letters-list"), [element("p", {class: "bad", text: error.message})]);
  }
}

// ---- what the reader does ----
const redraw = () => latest && draw(latest);
document.addEventListener("toggle", ({target}) => {
  if (!target.matches?.(".card") || target.open === opened.has(target.dataset.id)) return;
  if (target.open) opened.add(target.dataset.id);
  else opened.delete(target.dataset.id);
  redraw();
}, true);
document.addEventListener("click", ({target}) => {
  if (target.matches?.("button.letters")) showLetters({...target.dataset}, "GET");
  else if (target.matches?.("button.again")) showLetters({...target.dataset}, "POST");
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  const links = document.querySelectorAll("nav a");
  if (event.key === "/") byId("filter").focus();
  else if (/^[1-9]$/.test(event.key) && links[event.key - 1]) links[event.key - 1].click();
  else return;
  event.preventDefault();
});
byId("filter").addEventListener("input", redraw);
byId("filter").addEventListener("keydown", ({key}) => {
  if (key === "Escape") { byId("filter").value = ""; byId("filter").blur(); redraw(); }
});
byId("trouble").addEventListener("change", redraw);
byId("hours").addEventListener("change", drawHistory);
addEventListener("resize", () => latest && drawEdges(latest, new Map(latest.components.map((c) => [c.id, c]))));

ask("settings").then((found) => {
  settings = found;
  if (!found.history) return;
  byId("history-section").hidden = byId("history-link").hidden = false;
  drawHistory();
  setInterval(drawHistory, 30_000);
}).catch(() => {});
const stream = new EventSource(address("events"));
stream.onmessage = (message) => draw(JSON.parse(message.data));
stream.onerror = () => {
  byId("connection").textContent = "not connected: what you see is old";
  byId("connection").className = "lost";
};
