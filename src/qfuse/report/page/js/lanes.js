// The graph at four stages, one list per stage, in topological order and grouped by module.
const OVERLAYS = {
  none: { label: "nothing", of: () => null },
  us: { label: "microseconds", of: (s, n) => (s.us[n] < 0 ? null : s.us[n]), text: usText },
  share: {
    label: "share of roofline", low: true,
    of: (s, n) => (s.share[n] < 0 ? null : s.share[n]), text: (v) => `${Math.round(v * 100)} %`,
  },
  bytes: { label: "bytes", of: (s, n) => (s.kind[n] === "call" ? s.bytes[n] : null), text: bytesText },
  sqnr: {
    label: "SQNR", low: true,
    of: (s, n) => (s.kind[n] === "call" ? sqnrOf(text(s.module[n])) : null), text: (v) => `${number(v)} dB`,
  },
};

class Lane {
  constructor(stage, position) {
    Object.assign(this, { stage, position, marks: new Map() });
    const box = element("div", {
      id: `lane-${position}`, class: "list", tabindex: "0", role: "listbox", "aria-label": stage.name,
    });
    const title = element("h3", { text: stage.name[0].toUpperCase() + stage.name.slice(1) });
    this.count = element("span", { class: "count" });
    title.append(" ", this.count);
    $("lanes").append(element("div", { class: "lane" }, title, box));
    this.list = new VirtualList(
      box, 22, (row) => this.row(row), (row) => row.node !== undefined && choose(stage, row.node),
    );
    box.addEventListener("keydown", (event) => {
      const side = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (side) lanes[position + side]?.list.box.focus();
    });
    this.fill();
  }

  fill() {
    const { stage } = this;
    const rows = [];
    this.at = new Map();
    let module = null, calls = 0;
    for (let node = 0; node < stage.size; node++) {
      calls += stage.kind[node] === "call";
      if (stage.kind[node] === "constant" && !$("constants").checked) continue;
      if (stage.module[node] !== module && stage.kind[node] !== "output") {
        module = stage.module[node];
        rows.push({ group: text(module) || "(model)" });
      }
      this.at.set(node, rows.length);
      rows.push({ node });
    }
    this.count.textContent = `${calls.toLocaleString("en")} calls`;
    this.list.set(rows);
  }

  row(row) {
    if (row.node === undefined) {
      // The style writes from right to left to cut the beginning; marks keep punctuation in place.
      const name = `\u200e${row.group}\u200e`;
      return element("div", { class: "group", role: "presentation", text: name, title: row.group });
    }
    const { stage } = this, { node } = row;
    const mark = this.marks.get(node) ?? "";
    const made = element("div", {
      class: `node ${stage.kind[node]} ${stage.bad[node] ? "bad" : ""} ${mark}`, role: "option",
      "aria-selected": mark === "selected" || mark === "linked",
    });
    const title = `${stage.node[node]} = ${text(stage.op[node])}: ${text(stage.type[node])}`;
    made.title = title;
    const label = stage.kind[node] === "call" ? text(stage.op[node]) : stage.node[node];
    made.append(
      element("span", { class: "op", text: label }),
      element("span", { class: "type", text: text(stage.type[node]) }),
    );
    const value = overlay.current.of(stage, node);
    if (value !== null && value !== undefined) {
      made.append(element("span", { class: "value", text: overlay.shown(stage, node, value) }));
      made.style.setProperty("--heat", overlay.heat(value).toFixed(3));
      made.classList.add("hot");
    }
    return made;
  }

  /** Mark what corresponds to the selection, and what it reads. */
  mark(chosen, scroll) {
    this.marks.clear();
    if (chosen) {
      const { stage, node } = chosen;
      if (stage === this.stage) {
        for (const input of stage.inputs[node]) this.marks.set(input, "reads");
        for (const user of stage.users[node]) this.marks.set(user, "user");
        this.marks.set(node, "selected");
      } else for (const other of this.stage.counterparts(stage, node)) this.marks.set(other, "linked");
      const wanted = stage === this.stage ? [node] : [...this.marks.keys()];
      const first = wanted.find((one) => this.at.has(one) && this.stage.kind[one] === "call")
        ?? wanted.find((one) => this.at.has(one));
      if (first !== undefined && scroll) this.list.show(this.at.get(first));
    }
    this.list.draw();
  }
}

const overlay = {
  current: OVERLAYS.none,
  low: 0,
  high: 1,

  start() {
    const has = {
      none: true, us: Boolean(data.total), share: data.ops.some((op) => op.share !== null),
      bytes: true, sqnr: Object.keys(data.sqnr).length > 0,
    };
    for (const [name, { label }] of Object.entries(OVERLAYS))
      if (has[name]) $("overlay").append(element("option", { value: name, text: label }));
    $("overlay").addEventListener("change", () => this.choose($("overlay").value));
    if (has.us) $("overlay").value = "us";
    this.choose($("overlay").value);
  },

  choose(name) {
    this.current = OVERLAYS[name];
    let low = Infinity, high = -Infinity;
    for (const stage of stages)
      for (let node = 0; node < stage.size; node++) {
        const value = this.current.of(stage, node);
        if (value === null || value === undefined) continue;
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    Object.assign(this, { low, high });
    const { text: format } = this.current;
    const worst = this.current.low ? low : high, best = this.current.low ? high : low;
    $("legend").textContent = high < low ? "" : `${format(best)} (plain) to ${format(worst)} (strong)`;
    for (const lane of lanes) lane.list.draw();
  },

  shown(stage, node, value) {
    const format = this.current.text(value);
    return this.current === OVERLAYS.us && stage.shared[node] ? `of ${format}` : format;
  },

  heat(value) {
    // A share above 1 is as good as 1: the weights were in the cache.
    const high = this.current.low ? Math.min(this.high, this.current === OVERLAYS.share ? 1 : Infinity) : this.high;
    if (!(high > this.low)) return this.current.low ? 0 : 1;
    const part = Math.min(1, Math.max(0, (value - this.low) / (high - this.low)));
    return this.current.low ? 1 - part : Math.sqrt(part);
  },
};

let lanes = [];
