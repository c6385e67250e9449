// The status page: takes a snapshot a second from /events and shows it. Rates and latencies are differences of two
// snapshots; what is kept reaches five minutes back.
"use strict";

const KEPT = 300;
const RATE_S = 5;
const LATENCY_S = 60;
const TYPED_MS = 200;
const seen = [];

const one = (selector) => document.querySelector(selector);
const all = (selector) => document.querySelectorAll(selector);

// Numbers for people

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${unit ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

function count(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(2)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return value < 10 && value % 1 ? value.toFixed(1) : String(Math.round(value));
}

function span(seconds) {
  if (seconds === null || Number.isNaN(seconds)) return "–";
  if (seconds === Infinity) return "longer";
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${+(seconds * 1e3).toPrecision(3)} ms`;
  if (seconds < 90) return `${+seconds.toPrecision(3)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} d`;
}

// A quantile is known as a bound of the histogram's classes.
function atMost(seconds) {
  return seconds === null || seconds === Infinity ? span(seconds) : `≤ ${span(seconds)}`;
}

function ago(ms, nowMs) {
  return ms ? `${span(Math.max(0, nowMs - ms) / 1000)} ago` : "never";
}

// Differences of two snapshots

function earlier(seconds) {
  const now = seen[seen.length - 1];
  const wanted = now.time_ms - seconds * 1000;
  for (let place = seen.length - 2; place >= 0; place -= 1) {
    if (seen[place].time_ms <= wanted || place === 0) return seen[place];
  }
  return now;
}

function rate(key) {
  const now = seen[seen.length - 1];
  const before = earlier(RATE_S);
  const passed = (now.time_ms - before.time_ms) / 1000;
  return passed > 0 ? Math.max(0, now.path[key] - before.path[key]) / passed : 0;
}

function latency(name, share) {
  const now = seen[seen.length - 1].latencies[name];
  const before = earlier(LATENCY_S);
  const old = before === seen[seen.length - 1] ? null : before.latencies[name];
  const counts = now.counts.map((value, place) => value - (old ? old.counts[place] : 0));
  const total = counts.reduce((sum, value) => sum + value, 0);
  if (total <= 0) return { value: null, total: 0 };
  let below = 0;
  for (let place = 0; place < now.bounds_s.length; place += 1) {
    below += counts[place];
    if (below >= share * total) return { value: now.bounds_s[place], total };
  }
  return { value: Infinity, total };
}

// Showing

function show(name, text) {
  for (const element of all(`[data-show="${name}"]`)) element.textContent = text;
}

function level(element, value, warn, bad) {
  element.classList.toggle("bad", value >= bad);
  element.classList.toggle("warn", value >= warn && value < bad);
}

function fill(id, rows) {
  const body = one(`#${id} tbody`);
  const columns = document.querySelectorAll(`#${id} thead th`).length;
  if (!rows.length) {
    const row = document.createElement("tr");
    const td = document.createElement("td");
    td.colSpan = columns;
    td.className = "none";
    td.textContent = "none";
    row.append(td);
    body.replaceChildren(row);
    return;
  }
  body.replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    row.append(...cells.map((cell) => {
      const td = document.createElement("td");
      const [text, kind] = Array.isArray(cell) ? cell : [cell, ""];
      td.textContent = text;
      if (kind) td.className = kind;
      return td;
    }));
    return row;
  }));
}

function line(name, value) {
  const svg = one(`svg[data-line="${name}"]`);
  const values = (svg.values = (svg.values || []).concat(value).slice(-KEPT));
  const top = Math.max(...values, 1);
  const step = 300 / Math.max(60, values.length - 1);
  const from = 300 - step * (values.length - 1);
  const points = values.map((each, place) => `${(from + step * place).toFixed(1)},${(57 - (54 * each) / top).toFixed(1)}`);
  svg.firstElementChild.setAttribute("d", `M${points.join("L")}`);
}

function showPath(now) {
  const path = now.path;
  const rates = {
    append: rate("appended_messages"), write: rate("written_bytes"), dispatch: rate("dispatched_messages"),
    index: rate("index_entries"), deliver: rate("delivered_messages"), answer: rate("requests"),
  };
  show("append_rate", `${count(rates.append)} /s`);
  show("write_rate", `${bytes(rates.write)}/s`);
  show("dispatch_rate", `${count(rates.dispatch)} /s`);
  show("entry_rate", `${count(rates.index)} keys/s`);
  show("deliver_rate", `${count(rates.deliver)} /s`);
  show("request_rate", `${count(rates.answer)} req/s`);
  for (const [name, value] of Object.entries(rates)) one(`[data-arrow="${name}"]`).classList.toggle("flows", value > 0);

  show("producers", `${path.producers} connected`);
  show("consumers", `${path.consumers} connected`);
  show("log_bytes", bytes(path.written_bytes - path.min_bytes));
  show("queues", `${count(now.queue_count)} queues`);
  show("query", `${path.waiting_pulls} waiting`);
  show("writer", path.read_only ? "READ-ONLY" : `${count(path.appended_messages)} messages`);
  show("dispatcher", path.dispatch_behind_messages ? `${count(path.dispatch_behind_messages)} to go` : "all done");

  show("append_p99", `99 %: ${atMost(latency("append", 0.99).value)}`);
  const undurable = Math.max(path.queues_behind_bytes, path.index_behind_bytes);
  show("queues_behind", undurable ? `${bytes(undurable)} not durable` : "all durable");
  show("pull_p99", `99 %: ${atMost(latency("pull", 0.99).value)}`);
  show("dispatch_behind", path.dispatch_behind_bytes
    ? `${bytes(path.dispatch_behind_bytes)} behind` : "0 B behind");
  show("unflushed", path.flush_behind_bytes ? `${span(path.unflushed_s)} not durable` : "all durable");
  show("behind_bytes", `${bytes(path.dispatch_behind_bytes)}, ${span(path.dispatch_behind_s)}`);
  show("unflushed_bytes", `${bytes(path.flush_behind_bytes)}, ${span(path.unflushed_s)}`);
  show("group_lag", now.group_count ? `groups ${count(now.group_lag_messages)} behind` : "no groups");
  level(one('[data-arrow="dispatch"]'), path.dispatch_behind_s, 1, 10);
  level(one('[data-arrow="write"]'), path.unflushed_s, 15, 60);
  const states = Object.fromEntries(now.roles.map((role) => [role.role, role]));
  for (const node of all(".node[data-role]")) {
    const roles = node.dataset.role.split(" ").map((name) => states[name]);
    const well = roles.every((role) => role && role.pid && role.silent_s < 3);
    node.classList.toggle("good", Boolean(well));
    node.classList.toggle("bad", !well);
  }
  line("append", rates.append);
  line("deliver", rates.deliver);
  line("behind", path.dispatch_behind_bytes);
  line("unflushed", path.flush_behind_bytes);
}

function showRoles(now) {
  const before = earlier(RATE_S);
  const old = Object.fromEntries(before.roles.map((role) => [role.role, role]));
  const passed = Math.max(0.001, (now.time_ms - before.time_ms) / 1000);
  fill("roles", now.roles.map((role) => {
    const used = old[role.role] && old[role.role].pid === role.pid ? role.cpu_s - old[role.role].cpu_s : 0;
    const silent = role.silent_s >= 3;
    const state = silent ? `silent for ${span(role.silent_s)}` : role.state;
    const kind = !role.pid || silent ? "bad" : "good";
    return [role.role, [state, kind], bytes(role.memory_bytes), [`${Math.round((100 * used) / passed)} %`, "minor"],
      [String(role.restarts), role.restarts ? "warn" : ""], [String(role.errors), role.errors ? "warn" : ""]];
  }));
  show("memory", bytes(now.roles.reduce((sum, role) => sum + role.memory_bytes, 0)));
}

function ofAll(shown, all) {
  return all > shown ? `${shown} of ${all}` : String(all);
}

function searched(name, shown, found, all) {
  return name && all ? `${ofAll(shown, found)} found, ${all} in all` : ofAll(shown, all);
}

// The monitor searches all that it knows, and sends the first of what it finds.
function showTopics(now) {
  const before = earlier(RATE_S);
  const passed = Math.max(0.001, (now.time_ms - before.time_ms) / 1000);
  const old = Object.fromEntries(before.topics.map((topic) => [topic.topic, topic]));
  const speed = (topic, key) => count(Math.max(0, topic[key] - (old[topic.topic] ?? topic)[key]) / passed);
  fill("topics", now.topics.map((topic) => [topic.topic, [String(topic.queues), "minor"], count(topic.stored),
    [count(topic.appended), "minor"], speed(topic, "appended"), speed(topic, "delivered"), ago(topic.last_ms, now.time_ms)]));
  show("topic_count", searched(now.name, now.topics.length, now.topics_found, now.topic_count));
}

function showGroups(now) {
  fill("groups", now.groups.map((group) => [group.group, group.topic, count(group.lag_messages),
    group.lag_messages && group.lag_s !== null ? span(group.lag_s) : "–"]));
  show("group_count", searched(now.name, now.groups.length, now.groups_found, now.group_count));
}

function showDisk(now) {
  const disk = now.disk;
  const bar = one("#disk-bar");
  bar.style.width = `${(100 * disk.used_ratio).toFixed(1)}%`;
  bar.className = disk.full ? "bad" : disk.used_ratio >= disk.clean_ratio ? "warn" : "";
  fill("disk", [
    ["used", `${(100 * disk.used_ratio).toFixed(1)} % of ${bytes(disk.used_bytes + disk.free_bytes)}`],
    ["free", [bytes(disk.free_bytes), disk.full ? "bad" : ""]],
    ["sends are refused above", `${Math.round(100 * disk.warning_ratio)} %`],
    ["log", bytes(disk.log_bytes)],
    ["oldest message", ago(disk.oldest_ms, now.time_ms)],
    ["kept for", `${disk.reserved_hours} h`],
    ["deleted in this run", `${disk.deleted_segments} segments, ${bytes(disk.deleted_bytes)}`],
    ["held back by", disk.held_by],
    ["damaged ranges", [String(disk.holes), disk.holes ? "bad" : ""]],
  ]);
}

function showAll() {
  const now = seen[seen.length - 1];
  const verdict = one("#verdict");
  verdict.textContent = now.ready ? "ready" : now.group === "ready" ? "not ready" : now.group;
  verdict.className = `badge ${now.ready ? "good" : "bad"}`;
  document.title = `${now.ready ? "" : "⚠ "}mqproc ${now.store}`;
  one("#store").textContent = now.store;
  one("#since").textContent = `up ${span((now.time_ms - now.started_ms) / 1000)}`;
  one("#version").textContent = now.version;
  one("#problems").hidden = now.ready;
  one("#problems").textContent = now.problems.join(" · ");
  one("#warnings").hidden = !now.warnings.length;
  one("#warnings").textContent = now.warnings.join(" · ");
  showPath(now);
  showRoles(now);
  showTopics(now);
  showDisk(now);
  fill("latencies", Object.keys(now.latencies).map((name) => {
    const middle = latency(name, 0.5);
    return [name, atMost(middle.value), atMost(latency(name, 0.99).value), count(middle.total)];
  }));
  showGroups(now);
  fill("errors", now.errors.map((error) => [ago(error.last_ms, now.time_ms), error.role, count(error.count), error.text]));
}

function take(snapshot) {
  const last = seen[seen.length - 1];
  // Recovery ends with positions that were not known before: that is no rate.
  const recovered = last && last.group === "recovering" && snapshot.group !== "recovering";
  if (last && (last.epoch !== snapshot.epoch || recovered)) seen.length = 0;
  seen.push(snapshot);
  if (seen.length > KEPT) seen.shift();
  showAll();
}

let events = null;

function look() {
  if (events) events.close();
  events = new EventSource(`/events?name=${encodeURIComponent(one("#filter").value)}`);
  events.onmessage = (event) => { one("#lost").hidden = true; take(JSON.parse(event.data)); };
  events.onerror = () => { one("#lost").hidden = false; };
}

look();
let pause = 0;
one("#filter").addEventListener("input", () => { clearTimeout(pause); pause = setTimeout(look, TYPED_MS); });

const root = document.documentElement;
root.dataset.theme = localStorage.getItem("mqproc-theme") || "";
one("#theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("mqproc-theme", root.dataset.theme);
});
