// The selection, which all parts of the page share.
const times = { filter: 0, ready: 0 };
const selection = { site: null, stage: null, node: -1, op: null };

/** Select a node; `site` is the row that it was selected by. */
function choose(stage, node, site) {
  const own = site ?? data.sites[stage.site[node]] ?? siteOf(stage, node);
  Object.assign(selection, { stage, node, site: own ?? null });
  selection.op = opFor(stage, node);
  refresh();
}

function chooseSite(site) {
  if (!site.nodes.length) {
    Object.assign(selection, { site, stage: null, node: -1, op: null });
    refresh();
    return;
  }
  const [number, node] = site.nodes[0];
  choose(stages[number], node, site);
}

/** Return the site of a node that implements the same captured nodes. */
function siteOf(stage, node) {
  for (const other of [stages.at(-2), lowered])
    for (const there of other?.counterparts(stage, node) ?? []) {
      const site = data.sites[other.site[there]];
      if (site && site.status !== "not fused") return site;
    }
  return null;
}

/** Return the op that takes the longest of those that a node became. */
function opFor(stage, node) {
  const time = (op) => op.us ?? op.predicted ?? 0;
  let longest = null;
  for (const there of lowered.counterparts(stage, node)) {
    const op = opOf.get(there);
    if (op && (longest === null || time(op) > time(longest))) longest = op;
  }
  return longest;
}

function refresh() {
  const chosen = selection.stage ? { stage: selection.stage, node: selection.node } : null;
  table.show(selection.site);
  for (const lane of lanes) lane.mark(chosen, true);
  details.show(selection);
  timeline.chart?.later();
  memory.chart?.later();
}

function clear() {
  Object.assign(selection, { site: null, stage: null, node: -1, op: null });
  refresh();
}

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, select, textarea");
  if (event.key === "/" && !typing) {
    event.preventDefault();
    $("search").focus();
  } else if (event.key === "Escape") {
    if (typing && $("search").value) {
      $("search").value = "";
      table.filter();
    } else clear();
  }
});

for (const button of document.querySelectorAll(".todo"))
  button.addEventListener("click", () => {
    const first = data.todo[Number(button.dataset.todo)].sites[0];
    if (first === undefined) return;
    if (!table.list.rows.includes(data.sites[first])) {
      $("search").value = "";
      table.filter();
    }
    chooseSite(data.sites[first]);
    $("sites").scrollIntoView();
  });

if (stages.length) {
  lanes = stages.map((stage, position) => new Lane(stage, position));
  $("constants").addEventListener("change", () => {
    for (const lane of lanes) lane.fill();
    refresh();
  });
  overlay.start();
} else $("graph").hidden = true;
table.start();
timeline.start();
memory.start();
details.show(selection);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  timeline.chart?.draw();
  memory.chart?.draw();
});
starting = false;
times.ready = performance.now();
// For tests and benchmarks.
window.qfuse = { data, times, selection };
