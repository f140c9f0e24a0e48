// A list that keeps only the visible rows in the document.

// While the page starts nothing is drawn, since each drawing asks for the layout.
let starting = true;

class VirtualList {
  /**
   * @param {HTMLElement} box - The scrolling element.
   * @param {number} height - Height of a row in pixels.
   * @param {(row: any, index: number) => HTMLElement} render - Makes the element of a row.
   * @param {(row: any, index: number) => void} choose - Called when a row is chosen.
   */
  constructor(box, height, render, choose) {
    Object.assign(this, { box, height, render, choose, rows: [], active: -1 });
    this.spacer = element("div", { class: "spacer" });
    this.layer = element("div", { class: "layer" });
    box.append(this.spacer, this.layer);
    box.addEventListener("scroll", () => this.later());
    box.addEventListener("keydown", (event) => this.key(event));
    this.layer.addEventListener("click", (event) => {
      const row = event.target.closest("[data-row]");
      if (row) this.pick(Number(row.dataset.row));
    });
    new ResizeObserver(() => this.later()).observe(box);
  }

  set(rows) {
    this.rows = rows;
    this.spacer.style.height = `${rows.length * this.height}px`;
    this.draw();
  }

  later() {
    this.pending ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    if (starting) {
      this.later();
      return;
    }
    if (this.pending) cancelAnimationFrame(this.pending);
    this.pending = null;
    const { box, height, rows } = this;
    const first = Math.max(0, Math.floor(box.scrollTop / height) - 4);
    const last = Math.min(rows.length, Math.ceil((box.scrollTop + box.clientHeight) / height) + 4);
    const made = [];
    for (let index = first; index < last; index++) {
      const row = this.render(rows[index], index);
      row.dataset.row = index;
      row.id = `${box.id}-${index}`;
      made.push(row);
    }
    this.layer.style.transform = `translateY(${first * height}px)`;
    this.layer.replaceChildren(...made);
    if (this.active >= first && this.active < last)
      box.setAttribute("aria-activedescendant", `${box.id}-${this.active}`);
    else box.removeAttribute("aria-activedescendant");
  }

  /** Make a row visible; in the middle, unless it already is visible. */
  show(index) {
    this.active = index;
    const { box, height } = this;
    const top = index * height;
    if (top < box.scrollTop || top + height > box.scrollTop + box.clientHeight)
      box.scrollTop = Math.max(0, top - (box.clientHeight - height) / 2);
    this.draw();
  }

  pick(index) {
    if (index < 0 || index >= this.rows.length) return;
    this.show(index);
    this.choose(this.rows[index], index);
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.box.clientHeight / this.height) - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page };
    let to;
    if (event.key in steps) to = this.active + steps[event.key];
    else if (event.key === "Home") to = 0;
    else if (event.key === "End") to = this.rows.length - 1;
    else if (event.key === "Enter" || event.key === " ") to = this.active;
    else return;
    event.preventDefault();
    const step = event.key === "ArrowUp" || event.key === "PageUp" || event.key === "End" ? -1 : 1;
    to = Math.min(Math.max(to, 0), this.rows.length - 1);
    // Rows that only group others cannot be chosen.
    while (this.rows[to]?.group !== undefined) to += step;
    this.pick(to);
  }
}
