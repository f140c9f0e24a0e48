// The data of the page, and what is derived from it once.
const data = JSON.parse(document.getElementById("data").textContent);
const text = (number) => data.text[number];
const BAD = new Set(["expanded", "left"]);
const $ = (id) => document.getElementById(id);

function element(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "class") made.className = value;
    else if (name === "text") made.textContent = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function number(value, digits = 3) {
  if (value === null || value === undefined) return "";
  if (value >= 100) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

function bytesText(value) {
  if (value === null || value === undefined) return "";
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
    if (value >= size) return `${number(value / size)} ${unit}`;
  return `${value} B`;
}

function usText(value) {
  return value >= 1e4 ? `${number(value / 1e3)} ms` : `${number(value)} us`;
}

// The line of a source without its folders, or with the last of them; the whole path is in the title.
const fileLine = (line) => line.replace(/^[^:]*[/\\](?=[^/\\:]*:)/, "");
const folderLine = (line) => line.replace(/^[^:]*[/\\](?=[^/\\:]*[/\\][^/\\:]*:)/, "");

class Stage {
  constructor(raw) {
    Object.assign(this, raw);
    this.size = raw.node.length;
    this.users = Array.from({ length: this.size }, () => []);
    raw.inputs.forEach((inputs, user) => inputs.forEach((input) => this.users[input].push(user)));
    // For each captured node the nodes here that implement it.
    this.made = new Map();
    raw.origins.forEach((origins, node) => {
      for (const origin of origins) {
        if (!this.made.has(origin)) this.made.set(origin, []);
        this.made.get(origin).push(node);
      }
    });
    this.site = new Int32Array(this.size).fill(-1);
    this.bad = new Uint8Array(this.size);
    this.us = new Float64Array(this.size).fill(-1);
    this.share = new Float64Array(this.size).fill(-1);
    this.shared = new Uint8Array(this.size);
  }

  /** Return the nodes here that have an origin in common with one of another stage. */
  counterparts(stage, node) {
    if (stage === this) return [node];
    const found = new Set();
    for (const origin of stage.origins[node])
      for (const here of this.made.get(origin) ?? []) found.add(here);
    return [...found].sort((a, b) => a - b);
  }
}

const stages = data.stages.map((raw) => new Stage(raw));
const lowered = stages.at(-1);

data.sites.forEach((site, index) => {
  site.index = index;
  const words = [site.status, text(site.op), text(site.kernel), text(site.why), text(site.source)];
  words.push(text(site.module), text(site.do), text(site.losers));
  site.words = words.join("\n").toLowerCase();
  for (const [stage, node] of site.nodes) {
    const known = stages[stage].site[node];
    // What was left or expanded says more than a rule that did not match.
    if (known < 0 || data.sites[known].status === "not fused") stages[stage].site[node] = index;
  }
});

for (const site of data.sites) {
  if (!BAD.has(site.status)) continue;
  for (const [number, node] of site.nodes.slice(0, 1)) {
    const from = stages[number];
    for (const stage of stages.slice(0, -1))
      for (const other of stage.counterparts(from, node))
        if (stage.kind[other] === "call") stage.bad[other] = 1;
  }
  for (const [number, node] of site.nodes)
    if (stages[number].kind[node] === "call") stages[number].bad[node] = 1;
}

// Measured times belong to the nodes that run; those of other stages have the sum of what they became,
// which they may share with others.
const opOf = new Map();
for (const op of data.ops) {
  if (op.main === null || op.main === undefined) continue;
  if (op.us !== null) lowered.us[op.main] = op.us;
  if (op.share !== null) lowered.share[op.main] = op.share;
  for (const node of op.nodes) opOf.set(node, op);
}
const counted = new Map();

/** Return how many calls of a stage a lowered node implements. */
function owners(stage, node) {
  const key = `${stage.name} ${node}`;
  if (!counted.has(key)) {
    const calls = stage.counterparts(lowered, node).filter((one) => stage.kind[one] === "call");
    counted.set(key, calls.length);
  }
  return counted.get(key);
}

if (data.total)
  for (const stage of stages.slice(0, -1))
    for (let node = 0; node < stage.size; node++) {
      if (stage.kind[node] !== "call") continue;
      let us = -1, share = -1;
      for (const other of lowered.counterparts(stage, node)) {
        if (lowered.us[other] >= 0) {
          us = Math.max(us, 0) + lowered.us[other];
          stage.shared[node] |= owners(stage, other) > 1;
        }
        const its = lowered.share[other];
        if (its >= 0) share = share < 0 ? its : Math.min(share, its);
      }
      stage.us[node] = us;
      stage.share[node] = share;
    }

/** Return the dB of the innermost module that has one. */
function sqnrOf(module) {
  for (let path = module; ; path = path.slice(0, Math.max(path.lastIndexOf("."), 0))) {
    if (path in data.sqnr) return data.sqnr[path];
    if (!path) return null;
  }
}
