// The status page: takes a snapshot a second from /events and shows it. Rates and latencies are differences of two
// snapshots; what is kept reaches five minutes back.
"use strict";

const KEPT = 300;
const QUIET_S = 3;
const RATE_S = 5;
const LATENCY_S = 60;
const TYPED_MS = 200;
const BACK_MS = 1000;
const seen = [];

const one = (selector) => document.querySelector(selector);
const all = (selector) => document.querySelectorAll(selector);

// Numbers for people

function bytes(value) {
  if (value === null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${unit ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

function count(value) {
  if (value === null) return "–";
  if (value >= 1e6) return `${(value / 1e6).toFixed(2)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return value < 10 && value % 1 ? value.toFixed(1) : String(Math.round(value));
}

function span(seconds) {
  if (seconds === null || Number.isNaN(seconds)) return "–";
  if (seconds === Infinity) return "longer";
  // What began after now: the clock was set back.
  if (seconds <= 0) return "0 s";
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
  if (now.path[key] === null) return null;
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

function fill(id, rows, nothing = "none") {
  const body = one(`#${id} tbody`);
  const columns = document.querySelectorAll(`#${id} thead th`).length;
  if (!rows.length) {
    const row = document.createElement("tr");
    const td = document.createElement("td");
    td.colSpan = columns;
    td.className = "none";
    td.textContent = nothing;
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
  if (value === null) return;
  const svg = one(`svg[data-line="${name}"]`);
  const values = (svg.values = (svg.values || []).concat(value).slice(-KEPT));
  const top = Math.max(...values, 1);
  const step = 300 / Math.max(60, values.length - 1);
  const from = 300 - step * (values.length - 1);
  const points = values.map((each, place) => `${(from + step * place).toFixed(1)},${(57 - (54 * each) / top).toFixed(1)}`);
  svg.firstElementChild.setAttribute("d", `M${points.join("L")}`);
}

// What is not known is null: amid recovery, all positions.
function orUnknown(value, text) {
  return value === null ? "–" : text(value);
}

// A role that has not been started yet is at no fault; one that has not beaten lately may be in a long step.
function looks(role) {
  if (role.silent) return { kind: "bad", text: `silent for ${span(role.silent_s)}` };
  if (!role.pid) return { kind: role.state === "STOPPED" ? "" : "bad", text: role.state };
  const quiet = role.silent_s !== null && role.silent_s >= QUIET_S;
  if (role.state === "STARTING") return { kind: "warn", text: role.state };
  if (quiet && !role.busy) return { kind: "warn", text: `${role.state}, silent for ${span(role.silent_s)}` };
  if (role.state === "recovering") return { kind: "warn", text: role.state };
  return { kind: "good", text: quiet ? `${role.state} for ${span(role.silent_s)}` : role.state };
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

  show("producers", orUnknown(path.producers, (value) => `${value} connected`));
  show("consumers", orUnknown(path.consumers, (value) => `${value} connected`));
  show("log_bytes", bytes(now.disk.log_bytes));
  show("queues", orUnknown(now.queue_count, (value) => `${count(value)} queues`));
  show("query", orUnknown(path.waiting_pulls, (value) => `${value} waiting`));
  show("writer", path.read_only ? "READ-ONLY" : orUnknown(path.appended_messages, (value) => `${count(value)} messages`));
  show("dispatcher", orUnknown(path.dispatch_behind_messages, (value) => value ? `${count(value)} to go` : "all done"));

  show("append_p99", `99 %: ${atMost(latency("append", 0.99).value)}`);
  const undurable = path.queues_behind_bytes === null ? null : Math.max(path.queues_behind_bytes, path.index_behind_bytes);
  show("queues_behind", orUnknown(undurable, (value) => value ? `${bytes(value)} not durable` : "all durable"));
  show("pull_p99", `99 %: ${atMost(latency("pull", 0.99).value)}`);
  show("dispatch_behind", orUnknown(path.dispatch_behind_bytes, (value) => `${bytes(value)} behind`));
  show("unflushed", orUnknown(path.flush_behind_bytes,
    (value) => value ? `${span(path.unflushed_s)} not durable` : "all durable"));
  show("behind_bytes", orUnknown(path.dispatch_behind_bytes, (value) => `${bytes(value)}, ${span(path.dispatch_behind_s)}`));
  show("unflushed_bytes", orUnknown(path.flush_behind_bytes, (value) => `${bytes(value)}, ${span(path.unflushed_s)}`));
  show("group_lag", orUnknown(now.group_count,
    (value) => value ? `groups ${count(now.group_lag_messages)} behind` : "no groups"));
  level(one('[data-arrow="dispatch"]'), path.dispatch_behind_s, 1, 10);
  level(one('[data-arrow="write"]'), path.unflushed_s, 15, 60);
  const states = Object.fromEntries(now.roles.map((role) => [role.role, role]));
  for (const node of all(".node[data-role]")) {
    const roles = node.dataset.role.split(" ").map((name) => states[name]);
    const kinds = roles.map((role) => (role ? looks(role).kind : "bad"));
    node.classList.remove("good", "warn", "bad");
    const worst = ["bad", "warn", "", "good"].find((kind) => kinds.includes(kind));
    if (worst) node.classList.add(worst);
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
    const was = old[role.role];
    const used = was && was.pid === role.pid && was.cpu_s !== null ? role.cpu_s - was.cpu_s : 0;
    const percent = orUnknown(role.cpu_s, () => `${Math.round((100 * used) / passed)} %`);
    const { kind, text } = looks(role);
    return [role.role, [text, kind], bytes(role.memory_bytes), [percent, "minor"],
      [String(role.restarts), role.restarts ? "warn" : ""], [String(role.errors), role.errors ? "warn" : ""]];
  }));
  show("memory", bytes(now.roles.reduce((sum, role) => sum + (role.memory_bytes ?? 0), 0)));
}

function ofAll(shown, all) {
  if (all === null) return "–";
  return all > shown ? `${shown} of ${all}` : String(all);
}

function nothingOf(all) {
  return all === null ? "not known yet" : "none";
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
    [count(topic.appended), "minor"], speed(topic, "appended"), speed(topic, "delivered"), ago(topic.last_ms, now.time_ms)]),
    nothingOf(now.topic_count));
  show("topic_count", searched(now.name, now.topics.length, now.topics_found, now.topic_count));
}

function showGroups(now) {
  fill("groups", now.groups.map((group) => [group.group, group.topic, count(group.lag_messages),
    group.lag_messages && group.lag_s !== null ? span(group.lag_s) : "–", [count(group.waiting_retries), "minor"]]), nothingOf(now.group_count));
  show("group_count", searched(now.name, now.groups.length, now.groups_found, now.group_count));
}

function showDisk(now) {
  const disk = now.disk;
  const bar = one("#disk-bar");
  bar.style.width = `${(100 * (disk.used_ratio ?? 0)).toFixed(1)}%`;
  bar.className = disk.full ? "bad" : disk.used_ratio >= disk.clean_ratio ? "warn" : "";
  fill("disk", [
    ["used", orUnknown(disk.used_ratio,
      (value) => `${(100 * value).toFixed(1)} % of ${bytes(disk.used_bytes + disk.free_bytes)}`)],
    ["free", [bytes(disk.free_bytes), disk.full ? "bad" : ""]],
    ["sends are refused above", `${Math.round(100 * disk.warning_ratio)} %`],
    ["log", bytes(disk.log_bytes)],
    ["oldest message", orUnknown(disk.oldest_ms, (value) => ago(value, now.time_ms))],
    ["kept for", `${disk.reserved_hours} h`],
    ["deleted in this run", orUnknown(disk.deleted_segments, (value) => `${value} segments, ${bytes(disk.deleted_bytes)}`)],
    ["held back by", disk.held_by ?? "–"],
    ["damaged ranges", [orUnknown(disk.holes, String), disk.holes ? "bad" : ""]],
  ]);
}

function showAll() {
  const now = seen[seen.length - 1];
  const verdict = one("#verdict");
  verdict.textContent = now.group === "ready" ? now.state : now.group;
  // Recovery comes to its end by itself.
  verdict.className = `badge ${now.ready ? "good" : now.recovery === null ? "bad" : "warn"}`;
  document.title = `${now.ready ? "" : "⚠ "}mqproc ${now.store}`;
  one("#store").textContent = now.store;
  one("#since").textContent = now.recovery !== null ? "" : `up ${span((now.time_ms - now.started_ms) / 1000)}`;
  one("#version").textContent = now.version;
  one("#problems").hidden = now.ready;
  one("#problems").textContent = now.problems.map((each) =>
    `${each.problem}${each.since_ms ? `, for ${span((now.time_ms - each.since_ms) / 1000)}` : ""}: ${each.remedy}`).join(" · ");
  one("#problems").classList.toggle("warnings", now.recovery !== null);
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
  // Nor is what came in a time that is not over yet: the clock was set back.
  const back = last && snapshot.time_ms < last.time_ms - BACK_MS;
  if (last && (last.epoch !== snapshot.epoch || recovered || back)) seen.length = 0;
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
