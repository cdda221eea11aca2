// What the page writes as text: live requests, totals, memory, configuration.

import { byId, cell, element, groupColor, swatch, terms } from "./dom.js";
import { bytes, compact, count, percent, seconds } from "./format.js";

const OLD_SECONDS = 3;

export function showRequests(status) {
  const rows = status.requests.map((request) => {
    const phase = request.samples > 1 ? `${request.phase} × ${request.samples}` : request.phase;
    return element(
      "tr", {},
      cell(element("span", { class: "phase", "data-phase": request.phase }, phase)),
      cell(seconds(request.age), "number"),
      cell(count(request.prompt_tokens), "number"),
      cell(count(request.cached_tokens), "number"),
      cell(count(request.output_tokens), "number"),
    );
  });
  byId("requests").replaceChildren(...rows);
  byId("no-requests").hidden = rows.length > 0;
  byId("requests-aside").textContent = status.look_age > OLD_SECONDS
    ? `seen ${seconds(status.look_age)} ago: a step takes long`
    : `${count(status.running)} running, ${count(status.waiting)} waiting, ${compact(status.live_tokens)} tokens`;
  const { stop = 0, length = 0, abort = 0, error = 0 } = status.finished;
  terms(byId("totals"), [
    ["Finished", count(stop + length)],
    ["Aborted", count(abort)],
    ["Failed", count(error)],
    ["Prompt tokens", compact(status.prompt_tokens)],
    ["Generated tokens", compact(status.generation_tokens)],
    ["Prefix hits", status.prefix_query_tokens ? percent(status.cached_tokens / status.prefix_query_tokens) : "–"],
    ["Retractions", count(status.retractions)],
    ["Late compilations", count(status.compilations_after_warmup)],
    ["Cache in use", percent(status.kv_usage)],
  ]);
}

export function showMemory({ memory }) {
  const parts = [
    ["Weights", memory.weights, "var(--weights)"],
    ["Cache arena", memory.arena, "var(--arena)"],
    ["Device state", memory.device_state, "var(--device-state)"],
    ["Workspace of a step", memory.workspace, "var(--workspace)"],
  ];
  if (memory.free !== null) parts.push(["Free", memory.free, "var(--free)"]);
  const total = parts.reduce((sum, [, size]) => sum + size, 0);
  byId("memory-bar").replaceChildren(...parts.map(([name, size, color]) => {
    const part = element("span", { title: `${name}: ${bytes(size)}` });
    part.style.flexGrow = size / total;
    part.style.background = color;
    return part;
  }));
  byId("memory").replaceChildren(...parts.flatMap(([name, size, color]) => [
    element("dt", {}, swatch(color), name),
    element("dd", {}, bytes(size), element("small", {}, percent(size / total))),
  ]));
  byId("memory-aside").textContent = `${count(memory.num_parents)} parents of ${bytes(memory.parent_bytes)}`;
  byId("memory-groups").replaceChildren(...memory.groups.map((group, index) => element(
    "tr", {},
    cell(element("span", {}, swatch(groupColor(index)), group.group_id)),
    cell(group.bytes_per_token === null ? "–" : count(group.bytes_per_token), "number"),
    cell(count(group.cache_blocks_per_lcm_block), "number"),
    cell(`${compact(group.capacity)} ${group.unit}`, "number"),
  )));
}

export function showConfiguration(info) {
  const engine = { ...info.engine_config, ...info.start.options };
  byId("version").textContent = info.version;
  const name = info.served_model_name;
  byId("model").textContent = name.startsWith("/") ? name.split("/").at(-1) : name; // the end of a path tells it
  byId("model").title = name;
  document.title = `${name} · TokenSpeed-JAX`;
  terms(byId("configuration"), [
    ["Checkpoint", info.model],
    ["Context", `${count(info.max_model_len)} tokens`],
    ["Data type", engine.dtype],
    ["Samples at once", text(engine.max_num_seqs)],
    ["Tokens a step", text(engine.max_num_batched_tokens)],
    ["Prefix caching", text(engine.enable_prefix_caching)],
    ["Overlapped steps", text(engine.overlap_schedule)],
    ["Attention", engine.attention_implementation],
    ["Start", `${seconds(info.start.loading)} loading, ${seconds(info.start.compiling)} compiling`],
  ]);
  const options = { ...engine, ...info.server_config, served_model_name: info.served_model_name };
  terms(byId("all-options"), Object.keys(options).sort().map((name) => [name, text(options[name])]));
}

const text = (value) =>
  value === null ? "default" : value === true ? "on" : value === false ? "off" : typeof value === "number" ? count(value) : String(value);
