// The table of sites: search, filter by status, sort.
const ALL_COLUMNS = [
  { name: "status", width: "84px", key: (s) => s.status },
  { name: "op", width: "minmax(90px, 1.6fr)", key: (s) => text(s.op) },
  { name: "kernel", width: "minmax(80px, 1.4fr)", key: (s) => text(s.kernel).replace(/^qfuse\./, "") },
  { name: "reason", width: "minmax(120px, 3fr)", key: (s) => text(s.why) },
  { name: "source", width: "minmax(172px, 1.6fr)", key: (s) => fileLine(text(s.source)) || text(s.module) },
  { name: "suggestion", width: "minmax(70px, 2.2fr)", key: (s) => text(s.do) },
  { name: "predicted us", width: "76px", key: (s) => s.predicted, numeric: true },
  { name: "measured us", width: "84px", key: (s) => s.us, numeric: true },
];
// Without a profile nothing is measured.
const COLUMNS = ALL_COLUMNS.filter(({ key, numeric }) => !numeric || data.sites.some((site) => key(site) !== null));
const ORDER = ["left", "expanded", "not fused", "refused", "needed", "float", "loops", "kernel"];

const table = {
  sort: null,
  down: false,
  hidden: new Set(),
  list: null,

  start() {
    const head = $("head");
    COLUMNS.forEach((column, index) => {
      const button = element("button", { type: "button", text: column.name });
      button.addEventListener("click", () => this.sortBy(index));
      const numeric = column.numeric ? "n" : "";
      head.append(element("div", { role: "columnheader", "aria-sort": "none", class: numeric }, button));
    });
    $("table").style.setProperty("--columns", COLUMNS.map(({ width }) => width).join(" "));
    const counts = new Map();
    for (const site of data.sites) counts.set(site.status, (counts.get(site.status) ?? 0) + 1);
    for (const status of ORDER.filter((name) => counts.has(name))) {
      const box = element("input", { type: "checkbox", checked: "", "data-status": status });
      box.addEventListener("change", () => {
        this.hidden[box.checked ? "delete" : "add"](status);
        this.filter();
      });
      $("statuses").append(element("label", {}, box, ` ${status} ${counts.get(status)}`));
    }
    this.list = new VirtualList($("rows"), 26, (site) => this.row(site), (site) => chooseSite(site));
    $("search").addEventListener("input", () => this.filter());
    $("table").setAttribute("aria-rowcount", data.sites.length + 1);
    this.filter();
  },

  row(site) {
    const row = element("div", { role: "row", class: `row ${site.status.replace(" ", "-")}` });
    row.setAttribute("aria-selected", site === selection.site);
    for (const column of COLUMNS) {
      const value = column.key(site);
      const shown = column.numeric ? number(value) : value;
      const cell = element("div", { role: "gridcell", text: shown });
      if (column.numeric) cell.className = "n";
      else cell.title = column.name === "source" ? text(site.source) : shown;
      row.append(cell);
    }
    return row;
  },

  sortBy(index) {
    this.down = this.sort === index ? !this.down : COLUMNS[index].numeric === true;
    this.sort = index;
    [...$("head").children].forEach((cell, at) => {
      const way = this.down ? "descending" : "ascending";
      cell.setAttribute("aria-sort", at === index ? way : "none");
    });
    this.filter();
  },

  filter() {
    const begin = performance.now();
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = data.sites.filter(
      (site) => !this.hidden.has(site.status) && words.every((word) => site.words.includes(word)),
    );
    if (this.sort === null) rows.sort((a, b) => ORDER.indexOf(a.status) - ORDER.indexOf(b.status));
    else rows.sort(this.compare());
    this.list.active = rows.indexOf(selection.site);
    this.list.set(rows);
    $("count").textContent = `${rows.length.toLocaleString("en")} of ${data.sites.length.toLocaleString("en")}`;
    times.filter = performance.now() - begin;
  },

  compare() {
    const { key, numeric } = COLUMNS[this.sort];
    const sign = this.down ? -1 : 1;
    if (!numeric) {
      const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
      return (a, b) => sign * order(key(a), key(b)) || a.index - b.index;
    }
    // Sites without a number come last in both directions.
    return (a, b) => {
      const [left, right] = [key(a), key(b)];
      if (left === null || right === null) return (left === null) - (right === null);
      return sign * (left - right) || a.index - b.index;
    };
  },

  show(site) {
    const index = site ? this.list.rows.indexOf(site) : -1;
    if (index >= 0) this.list.show(index);
    else this.list.draw();
  },
};
