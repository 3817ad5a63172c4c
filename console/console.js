// The console's page: draws what /events sends, and keeps nothing else. All text is set as text, never as HTML.
"use strict";

const byId = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en", {maximumFractionDigits: 0});
const small = new Intl.NumberFormat("en", {maximumFractionDigits: 1});
const opened = new Set();
const COLUMNS = [
  ["Producers", (kind) => kind.endsWith(".publisher")],
  ["Consumers", (kind) => !kind.endsWith(".publisher") && kind !== "collector"],
  ["Collectors", (kind) => kind === "collector"],
];

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
  made.open = opened.has(component.id);
  made.addEventListener("toggle", () => (made.open ? opened.add(component.id) : opened.delete(component.id)));
  const figures = `${rate(component.rate)} · lag ${amount(component.lag)} · lost ${amount(component.lost)}`;
  const head = element("summary", {},
    element("span", {class: "name", text: title(component)}),
    element("span", {class: "status", text: component.status}),
    element("span", {class: "kind", text: `${component.kind} · pid ${component.pid}`}),
    element("span", {class: "figures", text: figures}));
  if (sources.length) head.append(element("span", {class: "from", text: `from ${sources.map(title).join(", ")}`}));
  head.append(sparkline(component.history));
  const facts = element("dl");
  const shown = {
    started: new Date(component.started * 1000).toISOString().slice(0, 19) + "Z", host: component.host,
    version: component.version, addresses: component.addresses.join(" "), ...component.state.counters,
  };
  for (const [name, value] of Object.entries(shown)) {
    const text = typeof value === "number" ? number.format(value) : String(value);
    facts.append(element("dt", {text: name}), element("dd", {text}));
  }
  made.append(head, facts);
  return made;
}

function sparkline(points) {
  const picture = svg("svg", {viewBox: "0 0 100 20", preserveAspectRatio: "none", "aria-hidden": "true"});
  if (points.length > 1) {
    const most = Math.max(1, ...points.map((p) => p[1]));
    const [from, to] = [points[0][0], points[points.length - 1][0]];
    const line = points.map((p) => `${(100 * (p[0] - from)) / Math.max(1e-9, to - from)},${19 - (18 * p[1]) / most}`);
    picture.append(svg("polyline", {points: line.join(" ")}));
  }
  return picture;
}

function drawMap(data) {
  byId("empty").hidden = data.components.length > 0;
  const focused = document.activeElement?.closest?.(".card")?.dataset.id;
  const byKey = new Map(data.components.map((c) => [c.id, c]));
  const columns = COLUMNS.map(([name, belongs]) => {
    const column = element("div", {class: "column"}, element("h3", {text: name}));
    for (const component of data.components.filter((c) => belongs(c.kind))) {
      const sources = data.edges.filter((e) => e.to === component.id).map((e) => byKey.get(e.from)).filter(Boolean);
      column.append(card(component, sources));
    }
    return column;
  });
  byId("columns").replaceChildren(...columns);
  if (focused) document.querySelector(`.card[data-id="${CSS.escape(focused)}"] summary`)?.focus();
  drawEdges(data, byKey);
}

function drawEdges(data, byKey) {
  const area = byId("map").getBoundingClientRect();
  const drawn = [];
  for (const {from, to} of data.edges) {
    const start = document.querySelector(`.card[data-id="${CSS.escape(from)}"]`)?.getBoundingClientRect();
    const end = document.querySelector(`.card[data-id="${CSS.escape(to)}"]`)?.getBoundingClientRect();
    const consumer = byKey.get(to);
    if (!start || !end || !consumer) continue;
    const x1 = start.right - area.left, y1 = start.top + 22 - area.top;
    const x2 = end.left - area.left, y2 = end.top + 22 - area.top;
    if (x2 <= x1) continue;
    const middle = (x1 + x2) / 2;
    const state = consumer.status === "dead" || consumer.lag > 1000 ? "behind" : consumer.rate > 0 ? "flowing" : "";
    drawn.push(svg("path", {d: `M${x1},${y1} C${middle},${y1} ${middle},${y2} ${x2},${y2}`, class: state}));
    const lag = consumer.lag ? ` · lag ${amount(consumer.lag)}` : "";
    drawn.push(svg("text", {x: middle, y: (y1 + y2) / 2 - 5, text: `${rate(consumer.rate)}${lag}`}));
  }
  byId("edges").replaceChildren(...drawn);
}

function drawLosses(data) {
  const rows = data.losses.map((loss) => [
    clock(loss.time), loss.source, loss.reason,
    loss.first === null ? "–" : `${amount(loss.first)} to ${amount(loss.last)}`, amount(loss.count), loss.by,
  ]);
  byId("losses").replaceChildren(table(
    [["time (UTC)"], ["source"], ["reason"], ["offsets", "number"], ["events", "number"], ["declared by", "wide"]],
    rows, "Nothing was declared lost in the last minutes."));
}

function drawAccounting(data) {
  const rows = [];
  const reasons = (account) => Object.entries(account.lost_by_reason || {}).filter(([, n]) => n)
    .map(([reason, n]) => `${reason} ${amount(n)}`).join(", ");
  for (const component of data.components) {
    const account = component.state.account;
    if (account) rows.push([`${component.kind} ${title(component)}`, amount(account.accepted), amount(account.delivered),
      amount(account.pending), amount(account.lost), reasons(account), verdict(account.balanced)]);
    for (const group of Object.values(component.state.groups || {})) {
      rows.push([`group ${group.name} of ${component.name}`, amount(group.offered), amount(group.acked + group.skipped),
        amount(group.pending), amount(group.lost + group.dead_lettered), reasons(group), verdict(group.balanced)]);
    }
  }
  byId("accounting").replaceChildren(table(
    [["stream", "wide"], ["accepted", "number"], ["delivered", "number"], ["pending", "number"], ["lost", "number"],
      ["reasons", "wide"], ["sum"]], rows, "No consumer is announced."));
}

function drawJournals(data) {
  const rows = [];
  for (const component of data.components) {
    const journal = component.state.journal;
    if (!journal) continue;
    const limits = Object.entries(journal.retention).filter(([, v]) => v).map(([k, v]) => `${k} ${amount(v)}`).join(", ");
    const behind = Object.entries(journal.behind).filter(([, n]) => n > 0).sort((a, b) => b[1] - a[1])
      .slice(0, 5).map(([name, n]) => `${name} ${amount(n)}`).join(", ");
    rows.push([component.name, journal.kind, amount(component.state.oldest), amount(component.state.next),
      amount(component.state.next - component.state.oldest), limits || "none", journal.on_full,
      amount(journal.counters.evicted), behind || "nobody"]);
  }
  byId("journals").replaceChildren(table(
    [["source"], ["journal"], ["oldest", "number"], ["next", "number"], ["events", "number"], ["retention", "wide"],
      ["when full"], ["evicted", "number"], ["behind", "wide"]], rows, "No journal is announced."));
}

function drawGroups(data) {
  const rows = [];
  for (const component of data.components) {
    for (const group of Object.values(component.state.groups || {})) {
      rows.push([group.name, component.name, amount(group.workers), amount(group.leased), amount(group.waiting),
        amount(group.redelivered), amount(group.dead_lettered), amount(group.lost)]);
    }
  }
  byId("groups").replaceChildren(table(
    [["group"], ["source"], ["workers", "number"], ["leased", "number"], ["waiting", "number"],
      ["redelivered", "number"], ["dead letters", "number"], ["lost", "number"]], rows, "No group is announced."));
}

function drawWebhooks(data) {
  const rows = [];
  for (const component of data.components.filter((c) => c.kind === "webhooks.dispatcher")) {
    const counters = component.state.counters || {};
    rows.push([component.name, amount(component.state.pending), amount(counters.delivered), amount(counters.gave_up),
      amount(counters.evicted), component.state.delivering ? "delivers" : "stands by", component.state.trouble || "–"]);
    for (const [endpoint, pending] of Object.entries(component.state.pending_by_endpoint || {})) {
      rows.push([`  ${endpoint}`, amount(pending), "", "", "", "", ""]);
    }
  }
  byId("webhooks").replaceChildren(table(
    [["dispatcher or endpoint", "wide"], ["pending", "number"], ["delivered", "number"], ["gave up", "number"],
      ["evicted", "number"], ["state"], ["trouble", "wide"]], rows, "No dispatcher is announced."));
}

function drawCounters(data) {
  const rows = [];
  for (const component of data.components.filter((c) => c.kind === "metrics.server")) {
    for (const [name, point] of Object.entries(component.state.series || {})) {
      rows.push([name, small.format(point.raw), small.format(point.corrected),
        point.bound === null ? "?" : `± ${small.format(point.bound)}`, point.grade, small.format(point.total)]);
    }
  }
  byId("counters").replaceChildren(table(
    [["counter", "wide"], ["raw", "number"], ["corrected", "number"], ["bound", "number"], ["grade"], ["total", "number"]],
    rows, "No metrics daemon is announced."));
}

function drawTotals(data) {
  const total = (field, belongs) => data.components.filter(belongs).reduce((sum, c) => sum + (c[field] || 0), 0);
  const groups = data.components.flatMap((c) => Object.values(c.state.groups || {}));
  const inGroups = groups.reduce((sum, group) => sum + group.lost, 0);
  const dead = data.components.filter((c) => c.status === "dead").length;
  const facts = {
    components: number.format(data.components.length),
    published: rate(total("rate", (c) => c.kind.endsWith(".publisher"))),
    delivered: rate(total("rate", (c) => /subscriber|worker/.test(c.kind))),
    lost: number.format(total("lost", (c) => !/publisher|worker/.test(c.kind)) + inGroups),
    dead: number.format(dead),
  };
  byId("totals").replaceChildren(...Object.entries(facts).map(([name, value]) => element("div", {},
    element("dt", {text: name}),
    element("dd", {text: value, class: (name === "dead" || name === "lost") && value !== "0" ? "bad" : ""}))));
}

let latest = null;
function draw(data) {
  latest = data;
  drawTotals(data);
  drawMap(data);
  for (const section of [drawLosses, drawAccounting, drawJournals, drawGroups, drawWebhooks, drawCounters]) section(data);
  const said = byId("connection");
  said.textContent = `live, ${clock(data.time)} UTC`;
  said.className = "";
  document.body.dataset.updated = data.time;
}

const token = new URLSearchParams(location.search).get("token");
const stream = new EventSource(token ? `events?token=${encodeURIComponent(token)}` : "events");
stream.onmessage = (message) => draw(JSON.parse(message.data));
stream.onerror = () => {
  byId("connection").textContent = "not connected: what you see is old";
  byId("connection").className = "lost";
};
addEventListener("resize", () => latest && drawEdges(latest, new Map(latest.components.map((c) => [c.id, c]))));
