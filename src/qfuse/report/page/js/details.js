// Everything about the selected node and its site.
const MOST_LINKS = 12;

const details = {
  show({ site, stage, node }) {
    const box = $("details");
    if (!site && !stage) {
      box.replaceChildren(element("p", { class: "hint", text: "Choose a row or a node. Arrow keys move, / searches, Esc clears." }));
      return;
    }
    const parts = [];
    if (site) parts.push(...this.site(site));
    if (stage) parts.push(...this.node(stage, node, site));
    box.replaceChildren(...parts);
    box.scrollTop = 0;
  },

  site(site) {
    const pattern = text(site.pattern);
    return [
      element("h2", {}, element("span", { class: `status ${site.status.replace(" ", "-")}`, text: site.status }), ` ${text(site.op)}`),
      text(site.do) ? element("p", { class: "do", text: text(site.do) }) : "",
      fields([
        ["reason", text(site.why)],
        ["kernel", text(site.kernel)],
        ["others", text(site.losers).split("\n").filter(Boolean).map((line) => element("div", { text: line }))],
        ["line", this.line(text(site.source))],
        ["module", text(site.module)],
        ["predicted", site.predicted === null ? "" : usText(site.predicted)],
        ["measured", site.us === null ? "" : usText(site.us)],
      ]),
      pattern ? element("pre", { text: pattern }) : "",
    ];
  },

  node(stage, node, site) {
    // What the site already says is not repeated.
    const unless = (name) => (site && site[name] === stage[name][node] ? "" : text(stage[name][node]));
    const op = stage === lowered ? opOf.get(node) : undefined;
    const links = (nodes, from) => {
      const shown = nodes.slice(0, MOST_LINKS).map((other) => this.link(from, other));
      return nodes.length > MOST_LINKS ? [...shown, ` and ${nodes.length - MOST_LINKS} more`] : shown;
    };
    return [
      element("h3", { text: `${stage.name}: ${stage.node[node]}` }),
      fields([
        ["op", text(stage.op[node])],
        ["type", text(stage.type[node])],
        ["bytes", stage.bytes[node] === null ? "" : bytesText(stage.bytes[node])],
        ["line", this.line(unless("source"))],
        ["module", unless("module")],
        ["made by", text(stage.rule[node])],
        ["measured", op && op.us !== null ? usText(op.us) : ""],
        ["predicted", op && op.predicted !== null ? usText(op.predicted) : ""],
        ["achieved", op ? [op.gb === null ? "" : `${number(op.gb)} GB/s`, op.gop ? `${number(op.gop)} GOP/s` : "", op.share === null ? "" : `${Math.round(op.share * 100)} % of roofline`].filter(Boolean).join(", ") : ""],
        ["reads", links(stage.inputs[node], stage)],
        ["read by", links(stage.users[node], stage)],
        ...stages.filter((other) => other !== stage).map((other) => [
          `in ${other.name}`,
          links(other.counterparts(stage, node).filter((one) => other.kind[one] === "call"), other),
        ]),
      ]),
    ];
  },

  line: (source) => (source ? [element("span", { text: folderLine(source), title: source })] : ""),

  link(stage, node) {
    const label = stage.kind[node] === "call" ? text(stage.op[node]) : stage.node[node];
    const button = element("button", { type: "button", class: "link", text: label, title: stage.node[node] });
    button.addEventListener("click", () => choose(stage, node));
    return button;
  },
};

function fields(pairs) {
  const list = element("dl");
  for (const [name, value] of pairs) {
    if (!value.length) continue;
    const shown = Array.isArray(value) ? value : [value];
    list.append(element("dt", { text: name }), element("dd", {}, ...shown));
  }
  return list;
}
