// Asks /status once a second while the page is seen, and hands the figures to the parts of the page.

import { Chart, SPAN_SECONDS } from "./charts.js";
import { byId } from "./dom.js";
import { compact, count, duration, percent, seconds } from "./format.js";
import { showConfiguration, showMemory, showRequests } from "./panels.js";
import { Pool } from "./pool.js";
import { Prompt } from "./prompt.js";
import { getJson, useKey } from "./server.js";

const POLL_MILLISECONDS = 1000;
const RETRY_MILLISECONDS = 3000;
const STATES = { ready: "Ready", draining: "Draining", failed: "Engine failed" };

// id, how values are written, least top of the scale, series as [name, column], largest top of the scale
const charts = [
  ["chart-generated", compact, 10, [["now", "generation_tokens"]]],
  ["chart-prompt", compact, 10, [["all", "prompt_tokens"], ["from cache", "cached_tokens"]]],
  ["chart-first", seconds, 0.01, [["p50", "first_token_p50"], ["p95", "first_token_p95"]]],
  ["chart-between", seconds, 0.001, [["p50", "between_tokens_p50"], ["p95", "between_tokens_p95"]]],
  ["chart-samples", count, 4, [["running", "running"], ["waiting", "waiting"]]],
  ["chart-hits", percent, 1, [["of prompt tokens", "prefix_hit_share"]], 1],
  ["chart-cache", percent, 1, [["held by samples", "kv_usage"]], 1],
  ["chart-step", seconds, 0.001, [["mean", "step_seconds"]]],
].map(([id, format, least, series, most]) => new Chart(byId(id), {
  series: series.map(([name, column]) => ({ name, column })), format, least, most,
}));
const pool = new Pool();
const prompt = new Prompt(askForKey);

let started = null; // which run of the server the history belongs to
let last = 0; // number of its last sample
let columns = { at: [] };
let facts = null; // of /server_info
let timer = null;
let isAsking = false;
let hasNewKey = false;
let isKeyTried = false;

async function poll() {
  if (isAsking) return;
  isAsking = true;
  hasNewKey = false;
  clearTimeout(timer);
  let wait = POLL_MILLISECONDS;
  try {
    let status = await getJson(`status?since=${last}`);
    if (status.started !== started) {
      if (started !== null) status = await getJson("status?since=0");
      await meet(status);
    }
    byId("key-form").hidden = true;
    show(status);
  } catch (error) {
    wait = RETRY_MILLISECONDS;
    if (error.status !== 401) setState("unreachable", "Unreachable");
    else if (!hasNewKey) askForKey();
  } finally {
    isAsking = false;
    if (!document.hidden) timer = setTimeout(poll, hasNewKey ? 0 : wait);
  }
}

// A server that the page has not seen before.
async function meet(status) {
  const info = await getJson("server_info");
  facts = info;
  started = status.started;
  columns = { at: [] };
  showConfiguration(info);
  showMemory(info);
  prompt.setModel(info.served_model_name, status.chat, info.max_model_len);
}

function show(status) {
  setState(status.state, STATES[status.state]);
  byId("facts").textContent = `up ${duration(status.age)} · ${count(facts.max_model_len)} tokens of context`;
  remember(status.history);
  const now = columns.at.at(-1) ?? status.age;
  for (const chart of charts) chart.show(columns, now);
  showRequests(status);
  if (status.pool !== null) pool.show(status.pool);
}

function remember(history) {
  last = history.last;
  const oldest = (history.columns.at.at(-1) ?? columns.at.at(-1) ?? 0) - SPAN_SECONDS;
  const kept = columns.at.findIndex((at) => at >= oldest);
  for (const [name, fresh] of Object.entries(history.columns)) {
    columns[name] = (kept < 0 ? [] : (columns[name] ?? []).slice(kept)).concat(fresh);
  }
}

function setState(state, text) {
  const shown = byId("state");
  shown.dataset.state = state;
  if (shown.textContent !== text) shown.textContent = text;
}

function askForKey() {
  setState("locked", "Locked");
  byId("key-form").hidden = false;
  if (isKeyTried) byId("key-note").textContent = "The server refused this key.";
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value);
  isKeyTried = hasNewKey = true;
  poll();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
poll();
