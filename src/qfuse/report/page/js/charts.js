// The timeline and the memory over time, drawn for the visible part only.
const HEIGHT = { lane: 30, label: 16, axis: 18, memory: 140 };

class Chart {
  constructor(box, height, paint) {
    Object.assign(this, { box, height, paint, zoom: 1 });
    this.pending = null;
    this.canvas = box.querySelector("canvas");
    this.spacer = box.querySelector(".spacer");
    box.addEventListener("scroll", () => this.later());
    new ResizeObserver(() => this.later()).observe(box);
  }

  later() {
    this.pending ??= requestAnimationFrame(() => {
      this.pending = null;
      this.draw();
    });
  }

  draw() {
    const width = this.box.clientWidth, ratio = window.devicePixelRatio || 1;
    if (!width) return;
    this.spacer.style.width = `${width * this.zoom}px`;
    this.canvas.width = width * ratio;
    this.canvas.height = this.height * ratio;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${this.height}px`;
    const paper = this.canvas.getContext("2d");
    paper.scale(ratio, ratio);
    paper.font = "11px system-ui, sans-serif";
    paper.textBaseline = "middle";
    this.paint(paper, { width, full: width * this.zoom, from: this.box.scrollLeft, height: this.height });
  }
}

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const timeline = {
  lanes: [],
  total: 0,

  start() {
    const lane = (name, key) => {
      let at = 0;
      const spans = data.ops.filter((op) => op[key] !== null).map((op) => {
        const span = { op, start: at, end: at + op[key] };
        at = span.end;
        return span;
      });
      return { name, spans, total: at };
    };
    this.lanes = [lane("measured", "us"), lane("predicted", "predicted")].filter((one) => one.spans.length);
    this.total = Math.max(...this.lanes.map((one) => one.total), 0);
    if (!this.lanes.length) {
      $("timeline").hidden = true;
      return;
    }
    const box = $("times");
    const words = this.lanes.map((one) => `${one.name}: ${one.spans.length} ops, ${usText(one.total)}`);
    box.setAttribute("aria-label", words.join("; "));
    $("hover").textContent = words.join("; ");
    this.words = words.join("; ");
    const height = HEIGHT.axis + this.lanes.length * (HEIGHT.label + HEIGHT.lane + 4);
    this.chart = new Chart(box, height, (paper, view) => this.paint(paper, view));
    $("zoom").addEventListener("input", () => {
      const middle = (box.scrollLeft + box.clientWidth / 2) / this.chart.zoom;
      this.chart.zoom = 2 ** Number($("zoom").value);
      this.chart.draw();
      box.scrollLeft = middle * this.chart.zoom - box.clientWidth / 2;
    });
    box.addEventListener("mousemove", (event) => this.hover(this.at(event)));
    box.addEventListener("mouseleave", () => this.hover(null));
    box.addEventListener("click", (event) => this.pick(this.at(event)));
    box.addEventListener("keydown", (event) => this.key(event));
    this.chart.later();
  },

  x: (view, time, total) => (time / total) * view.full - view.from,

  paint(paper, view) {
    const chosen = selection.op;
    const colors = {};
    for (const name of ["text", "chosen", "bar-bad", "bar-aten", "bar-kernel", "on-bar"]) colors[name] = color(name);
    let top = 0;
    for (const { name, spans, total } of this.lanes) {
      paper.fillStyle = colors.text;
      paper.fillText(`${name}  ${usText(total)}`, 4, top + HEIGHT.label / 2);
      top += HEIGHT.label;
      let done = -1;
      for (const span of spans) {
        const left = this.x(view, span.start, this.total), right = this.x(view, span.end, this.total);
        if (right < 0 || left > view.width) continue;
        const kind = span.op === chosen ? "chosen" : this.kind(span.op);
        // Of the ops that share a pixel, those that call for attention are drawn.
        if (Math.floor(right) === done && kind !== "chosen" && kind !== "bar-bad") continue;
        done = Math.floor(right);
        paper.fillStyle = colors[kind];
        const wide = Math.max(right - left - (right - left > 3 ? 1 : 0), 0.5);
        paper.fillRect(left, top, wide, HEIGHT.lane);
        const label = text(span.op.op).replace(/^[^.]*\./, "");
        // A whole word, or none.
        if (wide > 40 && wide > paper.measureText(label).width + 8) {
          paper.save();
          paper.beginPath();
          paper.rect(left, top, wide - 3, HEIGHT.lane);
          paper.clip();
          paper.fillStyle = colors["on-bar"];
          paper.fillText(label, Math.max(left, 0) + 4, top + HEIGHT.lane / 2);
          paper.restore();
        }
      }
      top += HEIGHT.lane + 4;
    }
    axis(paper, view, this.total, top);
  },

  kind(op) {
    if (op.main !== null && op.main !== undefined && lowered.bad[op.main]) return "bar-bad";
    return text(op.op).startsWith("aten.") ? "bar-aten" : "bar-kernel";
  },

  at(event) {
    const place = this.chart.canvas.getBoundingClientRect();
    const lane = this.lanes[Math.floor((event.clientY - place.top) / (HEIGHT.label + HEIGHT.lane + 4))];
    const time = ((event.clientX - place.left + this.chart.box.scrollLeft) / (this.chart.box.clientWidth * this.chart.zoom)) * this.total;
    return lane?.spans.find((span) => span.start <= time && time < span.end)?.op ?? null;
  },

  hover(op) {
    if (!op) {
      $("hover").textContent = this.words;
      return;
    }
    const parts = [text(op.op)];
    if (op.us !== null) parts.push(`measured ${usText(op.us)}`);
    if (op.predicted !== null) parts.push(`predicted ${usText(op.predicted)}`);
    if (op.share !== null) parts.push(`${Math.round(op.share * 100)} % of roofline`);
    $("hover").textContent = parts.join(", ");
  },

  pick(op) {
    if (op && op.main !== null) choose(lowered, op.main);
    this.hover(op);
  },

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const spans = this.lanes[0].spans;
    const now = spans.findIndex((span) => span.op === selection.op);
    const to = spans[Math.min(Math.max(now + step, 0), spans.length - 1)];
    this.pick(to.op);
    const box = this.chart.box, left = (to.start / this.total) * box.clientWidth * this.chart.zoom;
    if (left < box.scrollLeft || left > box.scrollLeft + box.clientWidth) box.scrollLeft = left - 40;
  },
};

/** Draw the marks of a time axis. */
function axis(paper, view, total, top) {
  paper.fillStyle = color("dim");
  if (!(total > 0)) return;
  const wanted = (total / view.full) * 120;
  const power = 10 ** Math.floor(Math.log10(wanted));
  const step = [1, 2, 5, 10].map((times) => times * power).find((one) => one >= wanted);
  const first = Math.floor(((view.from / view.full) * total) / step) * step;
  for (let time = first; time <= total; time += step) {
    const left = (time / total) * view.full - view.from;
    if (left > view.width) break;
    paper.fillRect(left, top, 1, 4);
    paper.fillText(time < 1e4 ? `${number(time, 6)} us` : `${number(time / 1e3, 6)} ms`, left + 3, top + 9);
  }
}

const memory = {
  start() {
    const points = data.memory;
    if (!points.length) {
      $("memory").hidden = true;
      return;
    }
    this.peak = Math.max(...points.map(([, during]) => during));
    const at = points.find(([, during]) => during === this.peak)[0];
    const what = text(lowered.op[at]), module = text(lowered.module[at]);
    const end = points.at(-1)[2];
    $("memory-text").textContent =
      `The values of the graph need up to ${bytesText(this.peak)}, at ${what}${module ? ` in ${module}` : ""}; ` +
      `${bytesText(end)} are left at the end: the outputs. Weights and inputs are not counted.`;
    $("bytes").setAttribute("aria-label", $("memory-text").textContent);
    this.chart = new Chart($("bytes"), HEIGHT.memory, (paper, view) => this.paint(paper, view));
    $("bytes").addEventListener("click", (event) => {
      const place = this.chart.canvas.getBoundingClientRect();
      const part = Math.floor(((event.clientX - place.left) / place.width) * points.length);
      choose(lowered, points[Math.min(part, points.length - 1)][0]);
    });
    this.chart.later();
  },

  paint(paper, view) {
    const points = data.memory, floor = view.height - 4;
    const y = (bytes) => floor - (bytes / (this.peak || 1)) * (floor - 14);
    const step = view.width / points.length;
    paper.beginPath();
    paper.moveTo(0, floor);
    points.forEach(([, during, after], index) => {
      paper.lineTo(index * step, y(during));
      paper.lineTo((index + 0.5) * step, y(during));
      paper.lineTo((index + 0.5) * step, y(after));
      paper.lineTo((index + 1) * step, y(after));
    });
    paper.lineTo(view.width, floor);
    paper.closePath();
    paper.fillStyle = color("bar-aten");
    paper.fill();
    const chosen = points.findIndex(([node]) => selection.stage === lowered && node === selection.node);
    if (chosen >= 0) {
      paper.fillStyle = color("chosen");
      paper.fillRect(chosen * step, 0, Math.max(step, 2), floor);
    }
    paper.fillStyle = color("text");
    paper.fillText(bytesText(this.peak), 4, 7);
  },
};
