"use strict";
(() => {
  const $ = (selector, where = document) => where.querySelector(selector);
  const all = (selector, where = document) => [...where.querySelectorAll(selector)];
  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  $("#theme").addEventListener("click", () => {
    const now = root.dataset.theme || (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
  });

  // The runs: each is drawn when it is opened, from the data that the page has once.
  const data = JSON.parse($("#rows").textContent);
  const number = (value) => value.toLocaleString("en-US");
  const time = (value) => (value === null ? "–" : `${value.toFixed(value < 10 ? 2 : 1)} s`);
  const latency = (value) => (value ? [value.p50, value.p99, value.p999, value.max].map((v) => v.toFixed(v < 1000 ? 1 : 0)).join(" / ") : "–");
  const size = (bytes) => (bytes === null ? "–" : bytes < 1e6 ? `${(bytes / 1e3).toFixed(0)} kB` : `${(bytes / 1e6).toFixed(1)} MB`);
  const percent = (value) => (value === null ? "–" : value === 0 ? "0" : value < 0.1 ? "<0.1 %" : `${value.toFixed(value < 9.95 ? 1 : 0)} %`);
  const shown = (name, value) => {
    if (name.startsWith("latency")) return latency(value);
    if (value === null) return "–";
    if (name.endsWith("_percent")) return percent(value);
    return name.endsWith("_s") ? time(value) : number(value);
  };
  const figure = (list, name, text, title, measure) => {
    const item = make("div");
    if (title) item.title = title;
    item.append(make("dt", "", name));
    const value = make("dd", "", text);
    if (measure) value.dataset.m = measure;
    item.append(value);
    list.append(item);
  };

  function fill(run) {
    if (run.dataset.filled) return;
    run.dataset.filled = "1";
    const row = data.rows[+run.dataset.row];
    const promise = row.expected;
    const words = { none: "to lose nothing", may: "nothing: it may lose", must: "nothing: it must lose" }[promise.loss];
    const reasons = promise.reasons.length ? ` (${promise.reasons.join(", ")})` : "";
    run.append(make("p", "promise", `Promises ${words}${reasons}${promise.why ? `: ${promise.why}` : ""}.`));
    if (row.timeline) run.append(timeline(row));
    for (const text of row.problems) run.append(make("p", "problems", text));
    for (const text of row.findings) run.append(make("p", "findings", `The product ${text}.`));
    const lost = make("p", "reasons");
    for (const [reason, count] of Object.entries(row.lost_by_reason)) {
      lost.append(make("i", `dot ${reason}`), `${number(count)} ${reason}: ${data.reasons[reason]}. `);
    }
    run.append(lost);
    const list = make("dl");
    for (const [name, definition] of Object.entries(data.measures)) {
      figure(list, name === "latency_ms" ? "latency_ms p50 / p99 / p99.9 / max" : name, shown(name, row[name]), definition, name);
    }
    for (const part of ["before", "during", "after"]) {
      figure(list, `latency ${part} the fault`, latency(row[`latency_${part}_ms`]), "ms, by the time when it was meant to be sent");
    }
    const price = row.price;
    if (price) {
      for (const who of ["producer", "consumer", "broker"]) {
        if (who === "broker" && !price.broker_memory) continue;
        figure(list, `${who} CPU per million`, `${price[`${who}_cpu_s`].toFixed(1)} s`);
        figure(list, `${who} memory`, size(price[`${who}_memory`]), "peak");
      }
      figure(list, "written to disk", size(price.disk_bytes));
      figure(list, "on the wire", size(price.wire_bytes), "with the headers of IP; known where the run had a network of its own");
      figure(list, "through the relay", size(price.relayed_bytes), "without headers");
    }
    run.append(list);
    const sums = `accepted = committed + lost + pending: ${number(row.accepted)} = ${number(row.committed)} + ${number(row.lost)} + ${number(row.pending)}`;
    const disturbed = row.at_once > 1 ? ` · ${row.at_once} runs at once: times and prices were disturbed (--jobs 1)` : "";
    if (row.compress > 1) run.append(make("p", "small", `Compressed: ${row.compress} s of the transport in each second of this run.`));
    run.append(make("p", "small", `${row.balanced ? "balanced" : "NOT balanced"}: ${sums} · unattributed: ${row.lost_by_reason.unattributed || 0}${disturbed}`));
  }

  const SVG = "http" + "://www.w3.org/2000/svg";
  const WIDTH = 720, HEIGHT = 120, STRIP = 14, BELOW = 44;

  // Sent, committed, lost by reason, and the highest latency, with the fault shaded. Drag to zoom, move to read.
  function timeline(row) {
    const line = row.timeline, steps = line.accepted.length, step = line.step_s;
    const box = make("figure");
    const head = make("div", "axis"), foot = make("div", "axis"), tip = make("div", "tip");
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT + STRIP + BELOW}`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `${row.transport}, ${row.scenario}: ${row.accepted} accepted, ${row.committed} committed, ${row.lost} lost`);
    let from = 0, to = steps;
    const add = (tag, className, attributes) => {
      const element = document.createElementNS(SVG, tag);
      element.setAttribute("class", className);
      for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
      svg.append(element);
      return element;
    };
    const draw = () => {
      svg.replaceChildren();
      const part = (values) => values.slice(from, to);
      const count = to - from, width = WIDTH / count;
      const x = (seconds) => Math.min(WIDTH, Math.max(0, (seconds / step - from) * width));
      const top = Math.max(...part(line.accepted), ...part(line.committed), 1);
      // The square root keeps a normal rate visible beside the spike in which a backlog is delivered.
      const y = (value) => HEIGHT - Math.sqrt(value / top) * (HEIGHT - 4);
      const path = (values, level) => values.map((value, i) => `V${level(value).toFixed(1)}H${((i + 1) * width).toFixed(1)}`).join("");
      if (row.fault) {
        const [begin, end] = row.fault.map(x);
        if (end > begin) add("rect", "fault", { x: begin, y: 0, width: Math.max(1, end - begin), height: HEIGHT + STRIP + BELOW });
      }
      add("path", "delivered", { d: `M0 ${HEIGHT}${path(part(line.committed), y)}V${HEIGHT}Z` });
      add("path", "sent", { d: `M0 ${y(line.accepted[from])}${path(part(line.accepted), y)}` });
      const base = new Array(count).fill(0);
      for (const [reason, counts] of Object.entries(line.lost)) {
        part(counts).forEach((lost, i) => {
          if (!lost) return;
          const height = Math.max(2, Math.min(1, lost / Math.max(1, line.accepted[from + i])) * (STRIP - 2));
          base[i] += height;
          add("rect", `lost ${reason}`, { x: i * width, y: HEIGHT + STRIP - base[i], width: Math.max(1.2, width), height });
        });
      }
      const slow = Math.max(...part(line.latency_ms), 1), bottom = HEIGHT + STRIP + BELOW;
      const level = (value) => bottom - (Math.log1p(value) / Math.log1p(slow)) * (BELOW - 6);
      add("path", "latency", { d: `M0 ${bottom}${path(part(line.latency_ms), level)}V${bottom}Z` });
      add("line", "cursor", { x1: -9, x2: -9, y1: 0, y2: bottom });
      head.replaceChildren(make("span", "", `up to ${number(Math.round(top / step))} events/s (square-root scale)`), make("span", "", `latency up to ${number(Math.round(slow))} ms (logarithmic)`));
      foot.replaceChildren(make("span", "", `${(from * step).toFixed(2)} s`));
      const keys = make("span", "keys");
      const key = (className, text) => {
        const item = make("span");
        item.append(make("i", className), text);
        keys.append(item, " ");
      };
      key("k-sent", "sent"); key("k-delivered", "committed"); key("k-latency", "latency");
      key("k-fault", row.fault ? `fault ${Math.max(0, row.fault[0]).toFixed(1)}–${row.fault[1].toFixed(1)} s` : "no fault");
      for (const reason of Object.keys(line.lost)) key(`dot ${reason}`, `lost: ${reason}`);
      foot.append(keys, make("span", "", `${(to * step).toFixed(2)} s`));
      box.classList.toggle("zoomed", count < steps);
    };
    const stepAt = (event) => {
      const area = svg.getBoundingClientRect();
      return Math.min(to - 1, Math.max(from, from + Math.floor(((event.clientX - area.left) / area.width) * (to - from))));
    };
    let pressed = null;
    svg.addEventListener("pointerdown", (event) => { pressed = stepAt(event); svg.setPointerCapture(event.pointerId); });
    svg.addEventListener("pointermove", (event) => {
      const at = stepAt(event), width = WIDTH / (to - from), seconds = at * step;
      const begin = pressed === null ? at : Math.min(at, pressed), end = pressed === null ? at : Math.max(at, pressed);
      const cursor = $(".cursor", svg);
      cursor.setAttribute("x1", (begin - from + 0.5) * width); cursor.setAttribute("x2", (begin - from + 0.5) * width);
      let mark = $(".chosen", svg);
      if (mark) mark.remove();
      if (end > begin) add("rect", "chosen", { x: (begin - from) * width, y: 0, width: (end - begin + 1) * width, height: HEIGHT + STRIP + BELOW });
      const lost = Object.entries(line.lost).filter(([, counts]) => counts[at]).map(([reason, counts]) => `, lost ${number(counts[at])} (${reason})`).join("");
      const faulty = row.fault && seconds + step >= row.fault[0] && seconds <= row.fault[1] ? " · fault" : "";
      tip.textContent = `${seconds.toFixed(2)} s: ${number(Math.round(line.accepted[at] / step))}/s sent, ${number(Math.round(line.committed[at] / step))}/s committed${lost}, latency ${line.latency_ms[at] || "–"} ms${faulty}`;
    });
    svg.addEventListener("pointerup", (event) => {
      const at = stepAt(event);
      if (pressed !== null && Math.abs(at - pressed) > 1) { [from, to] = [Math.min(at, pressed), Math.max(at, pressed) + 1]; draw(); }
      pressed = null;
    });
    svg.addEventListener("pointerleave", () => { if (pressed === null) tip.textContent = "drag to zoom"; });
    const whole = make("button", "whole", "whole run");
    whole.type = "button";
    whole.addEventListener("click", () => { from = 0; to = steps; draw(); });
    tip.textContent = "drag to zoom";
    draw();
    const below = make("div", "axis");
    below.append(tip, whole);
    box.append(head, svg, foot, below);
    return box;
  }

  all("details[data-row]").forEach((run) => run.addEventListener("toggle", () => { if (run.open) fill(run); }));

  // Filter and sort. What is chosen is in the address, so that it can be sent to somebody.
  const find = $("#find"), show = $("#show"), body = $(".matrix tbody"), order = all("tr", body);
  let sorted = "";
  const wanted = {
    all: () => true,
    lost: (cell) => +cell.dataset.lost > 0,
    failed: (cell) => cell.classList.contains("bad") || cell.classList.contains("unknown"),
    lucky: (cell) => cell.classList.contains("lucky"),
  };
  const chosen = {
    all: () => true,
    lost: (row) => row.lost > 0,
    failed: (row) => row.verdict !== "pass",
    lucky: (row) => !row.lost && row.expected.loss !== "none",
  };
  function arrange() {
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (text) => words.every((word) => text.includes(word));
    for (const line of order) {
      let any = false;
      for (const cell of all("td[data-scenario]", line)) {
        const text = `${cell.dataset.transport} ${cell.dataset.scenario} ${cell.dataset.reasons}`.toLowerCase();
        const visible = fits(text) && wanted[show.value](cell);
        cell.classList.toggle("faded", !visible);
        any = any || visible;
      }
      line.hidden = !any;
    }
    all("details[data-row]").forEach((run) => {
      const row = data.rows[+run.dataset.row];
      const text = `${row.transport} ${row.scenario} ${Object.keys(row.lost_by_reason).join(" ")}`.toLowerCase();
      run.hidden = !(fits(text) && chosen[show.value](row));
    });
    all(".transport").forEach((section) => { section.hidden = !all("details", section).some((run) => !run.hidden); });
    const value = (line) => { const cell = $(`td[data-scenario="${CSS.escape(sorted)}"]`, line); return cell ? +cell.dataset.percent : -1; };
    body.append(...(sorted ? [...order].sort((a, b) => value(b) - value(a)) : order));
    all(".matrix thead button").forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.sort === sorted)));
  }
  const remember = () => {
    const state = new URLSearchParams();
    if (find.value) state.set("find", find.value);
    if (show.value !== "all") state.set("show", show.value);
    if (sorted) state.set("sort", sorted);
    history.replaceState(null, "", `#${state}`);
    arrange();
  };
  find.addEventListener("input", remember);
  show.addEventListener("change", remember);
  all(".matrix thead button").forEach((button) => button.addEventListener("click", () => {
    sorted = sorted === button.dataset.sort ? "" : button.dataset.sort;
    remember();
  }));
  const follow = () => {
    const hash = decodeURIComponent(location.hash.slice(1));
    const target = hash && document.getElementById(hash);
    if (target) {
      if (target.tagName === "DETAILS") { target.open = true; fill(target); }
      target.scrollIntoView({ block: "start", behavior: "instant" });
    } else {
      const state = new URLSearchParams(location.hash.slice(1));
      find.value = state.get("find") || "";
      show.value = state.get("show") in wanted ? state.get("show") : "all";
      sorted = state.get("sort") || "";
      arrange();
    }
  };
  addEventListener("hashchange", follow);
  follow();

  // Paper cannot be clicked: what failed or lost something is printed with its timeline.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = all("details:not([open])").filter((run) => run.dataset.row && (data.rows[+run.dataset.row].lost || !$(".badge.pass", run)));
    opened.forEach((run) => { run.open = true; fill(run); });
  });
  addEventListener("afterprint", () => opened.forEach((run) => { run.open = false; }));
})();
