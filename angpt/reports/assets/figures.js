// Draws the line charts of the page again, from the data beside each picture, so that they show values under the
// pointer, hide and show lines, zoom, and change between linear and logarithmic axes. Without this script, and in
// print, the pictures stay.
"use strict";
(() => {
const EACH_RUN = "each run";      // thin lines, of which the mean is a line, too
const SINGLE_RUN = "single run";  // thin lines of a budget without a mean
const REACH = 40;  // pixels from the pointer within which a line shows its nearest value
const ROWS = 12;   // most values that are shown at once
const FONT = "12px system-ui, sans-serif";

const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const isRun = line => line.note === EACH_RUN || line.note === SINGLE_RUN;

function make(tag, parent, properties = {}) {
  const element = Object.assign(document.createElement(tag), properties);
  parent?.append(element);
  return element;
}

function text(value) {
  for (const [size, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]]) {
    const scaled = unit === "k" ? 1e3 : size;
    if (Math.abs(value) >= size) return Number((value / scaled).toPrecision(4)) + unit;
  }
  return String(Number(value.toPrecision(4))).replace("-", "−");
}

// Round values between two ends: steps of 1, 2 or 5 times a power of ten; over a factor of ten or more on a
// logarithmic axis, the powers of ten themselves, with their multiples where there is room.
function roundValues(low, high, most, log) {
  const found = [];
  if (log && high / low >= 10) {
    const decades = Math.log10(high / low);
    const factors = decades < most / 3 ? [1, 2, 5] : [1];
    const every = Math.ceil(decades / most);
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const factor of factors)
        if (power % every === 0) found.push(factor * 10 ** power);
  } else {
    const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
    const step = power * [1, 2, 5, 10].find(factor => factor * power >= raw);
    for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(Number((i * step).toPrecision(10)));
  }
  return found.filter(value => value >= low && value <= high);
}

// The limits of an axis (0: x, 1: y); on a logarithmic one, above zero. Null if there is nothing above zero.
function limits(panel, axis, log) {
  const [low, high] = [...panel.limits[axis]].sort((a, b) => a - b);
  if (!log || low > 0) return [low, high];
  const above = panel.series.flatMap(line => line["xy"[axis]]).filter(value => value > 0);
  return above.length && high > 0 ? [Math.min(...above), high] : null;
}

class Panel {
  constructor(figure, panel, place) {
    Object.assign(this, {figure, panel, log: [...panel.log], on: panel.series.map(() => true), zoomed: []});
    const box = make("div", place, {className: "panel"});
    make("h4", box, {textContent: panel.title});
    this.place = make("div", box, {className: "plot", tabIndex: 0});
    this.place.setAttribute("role", "group");
    this.place.setAttribute("aria-label", `Chart: ${panel.title || figure.title}. The arrow keys left and right show ` +
      "values, plus and minus zoom, 0 shows everything.");
    this.place.addEventListener("keydown", event => this.press(event));
    this.values = make("div", box, {className: "values", hidden: true});
    this.values.setAttribute("aria-live", "polite");
    this.joined = uPlot.join(panel.series.map(line => [line.x, line.y]));
  }

  draw() {
    const width = this.place.clientWidth;
    if (!width) return;  // in a closed section
    this.chart?.destroy();
    this.values.hidden = true;
    const {panel} = this, height = 260;
    const log = [0, 1].map(axis => this.log[axis] && limits(panel, axis, true) !== null);
    const scale = axis => {
      const [low, high] = limits(panel, axis, log[axis]);
      const whole = low < high ? [low, high] : [low - 1, high + 1];
      const range = () => {
        const part = this.zoomed[axis];
        return part && (!log[axis] || part[0] > 0) ? part : whole;
      };
      return {time: false, distr: log[axis] ? 3 : 1, range};
    };
    const axis = (which, most) => ({
      label: panel.labels[which], labelFont: FONT, labelSize: 20, font: FONT, size: which ? 56 : 34, gap: 4,
      stroke: () => color("--soft"), grid: {stroke: () => color("--line"), width: 1},
      ticks: {stroke: () => color("--line"), width: 1}, filter: (_, splits) => splits,
      splits: (_, __, low, high) => which === 0 && panel.ticks
        ? panel.ticks.map(tick => tick[0]).filter(at => at >= low && at <= high)
        : roundValues(low, high, most, log[which]),
      values: (_, splits) => splits.map(value => this.tick(which, value)),
    });
    this.chart = new uPlot({
      width, height, legend: {show: false}, padding: [8, 12, 0, 0],
      scales: {x: scale(0), y: scale(1)},
      axes: [axis(0, Math.max(2, Math.floor(width / 75))), axis(1, 6)],
      series: [{}, ...panel.series.map((line, i) => this.series(line, i))],
      cursor: {
        drag: {x: true, y: true, uni: 25, setScale: false}, bind: {dblclick: () => () => this.reset()},
        dataIdx: (_, i, index) => this.nearest(i, index), points: {size: 7},
      },
      hooks: {
        setCursor: [() => this.show()], setSelect: [chart => this.zoomTo(chart.select)],
        drawAxes: [() => this.drawBehind()], draw: [() => this.drawBounds()],
      },
    }, this.joined, this.place);
  }

  // Shows a part of the panel, in pixels; the axes ask for `zoomed` when the scale of x is set.
  zoomTo({left, top, width, height}) {
    const {chart} = this;
    if (!width || !height) return;
    chart.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
    this.zoomed = [
      [left, left + width].map(pixel => chart.posToVal(pixel, "x")),
      [top + height, top].map(pixel => chart.posToVal(pixel, "y")),
    ];
    chart.setScale("x", {min: this.zoomed[0][0], max: this.zoomed[0][1]});
  }

  reset() {
    this.zoomed = [];
    this.draw();
  }

  series(line, i) {
    const thin = isRun(line), stroke = () => line.color || color("--ink");
    return {
      label: line.name, show: this.on[i], stroke, spanGaps: true, width: line.dots ? 0 : thin ? 0.6 : 2,
      alpha: thin ? 0.5 : 1, dash: line.dash ? [5, 4] : [], paths: line.dots ? () => null : undefined,
      points: {show: line.dots || (!thin && line.x.length <= 12), size: 7, stroke, fill: line.dots ? "transparent" : stroke},
    };
  }

  // Calls `paint` with the context of the canvas and with functions from values to its pixels, clipped to the panel.
  paint(paint) {
    const {chart} = this, {ctx, bbox} = chart;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    paint(ctx, value => chart.valToPos(value, "x", true), value => chart.valToPos(value, "y", true), devicePixelRatio);
    ctx.restore();
  }

  isShown(shade) {
    return this.panel.series.some((line, i) => line.color === shade && this.on[i]);
  }

  drawBehind() {
    this.paint((ctx, x, y, unit) => {
      const {left, top, width, height} = this.chart.bbox;
      for (const area of this.panel.areas.filter(area => this.isShown(area.color))) {
        ctx.fillStyle = area.color || color("--ink");
        ctx.globalAlpha = 0.15;
        ctx.beginPath();
        area.x.forEach((value, i) => ctx.lineTo(x(value), y(area.y[i])));
        ctx.fill();
      }
      ctx.globalAlpha = 1;
      ctx.lineWidth = unit;
      ctx.strokeStyle = color("--soft");
      ctx.setLineDash([4 * unit, 3 * unit]);
      for (const [axis, value] of this.panel.rules) {
        ctx.beginPath();
        ctx.moveTo(axis === "x" ? x(value) : left, axis === "x" ? top : y(value));
        ctx.lineTo(axis === "x" ? x(value) : left + width, axis === "x" ? top + height : y(value));
        ctx.stroke();
      }
    });
  }

  // Error bars, and arrows from bounds towards where the true value lies.
  drawBounds() {
    this.paint((ctx, x, y, unit) => {
      ctx.lineWidth = 1.4 * unit;
      const stroke = (shade, ...points) => {
        ctx.strokeStyle = shade || color("--ink");
        ctx.beginPath();
        points.forEach(([a, b], i) => i ? ctx.lineTo(a, b) : ctx.moveTo(a, b));
        ctx.stroke();
      };
      for (const bar of this.panel.bars.filter(bar => this.isShown(bar.color))) {
        const at = x(bar.x), cap = 4 * unit, ends = bar.y.map(y);
        stroke(bar.color, [at, ends[0]], [at, ends[1]]);
        for (const end of ends) stroke(bar.color, [at - cap, end], [at + cap, end]);
      }
      this.panel.series.forEach((line, i) => {
        const up = {"more than": -1, "less than": 1}[line.note];
        if (up && this.on[i]) line.x.forEach((value, j) => {
          const at = x(value), from = y(line.y[j]) + 5 * up * unit, to = from + 18 * up * unit, tip = 4 * unit;
          stroke(line.color, [at, from], [at, to]);
          stroke(line.color, [at - tip, to - up * tip], [at, to], [at + tip, to - up * tip]);
        });
      });
    });
  }

  // A value of an axis in words. Points beside a budget, apart so that their bars do not overlap, have its name.
  tick(axis, value) {
    const {ticks, log} = this.panel;
    const isAt = place => place === value || (log[0] && Math.abs(Math.log(place / value)) < 0.18);
    return (axis === 0 && ticks?.find(tick => isAt(tick[0]))?.[1]) || text(value);
  }

  // The place of a line's value that is nearest to the pointer, if one is near; runs of which the mean is shown have none.
  nearest(i, index) {
    if (i === 0) return index;
    if (this.panel.series[i - 1].note === EACH_RUN) return null;
    const [xs, ys] = [this.joined[0], this.joined[i]], {chart} = this;
    let best = null, least = REACH;
    const left = chart.valToPos(xs[index], "x");
    for (const direction of [-1, 1])
      for (let at = index; at >= 0 && at < xs.length; at += direction) {
        const distance = Math.abs(chart.valToPos(xs[at], "x") - left);
        if (distance > REACH) break;
        if (ys[at] != null) {
          if (distance < least || best === null) [best, least] = [at, distance];
          break;
        }
      }
    return best;
  }

  show() {
    const {chart, panel} = this, {left, top, idx} = chart.cursor;
    if (!(left >= 0) || idx == null) { this.values.hidden = true; return; }
    const rows = panel.series.flatMap((line, i) => {
      const at = this.on[i] ? this.nearest(i + 1, idx) : null;
      return at === null ? [] : [{line, value: this.joined[i + 1][at]}];
    });
    rows.sort((a, b) => Math.abs(chart.valToPos(a.value, "y") - top) - Math.abs(chart.valToPos(b.value, "y") - top));
    const shown = rows.slice(0, ROWS).sort((a, b) => b.value - a.value);
    this.values.replaceChildren();
    make("strong", this.values, {textContent: `${panel.labels[0] || "x"} ${this.tick(0, this.joined[0][idx])}`});
    for (const {line, value} of shown) {
      const row = make("span", this.values);
      make("i", row, {className: "swatch"}).style.background = line.color || color("--ink");
      row.append(`${line.name}${line.note ? `, ${line.note}` : ""} `);
      make("b", row, {textContent: text(value)});
    }
    this.values.hidden = !shown.length;
    const {width} = this.place.getBoundingClientRect();
    const inside = chart.over.offsetLeft + left, room = this.values.offsetWidth + 16;
    this.values.style.left = `${Math.max(0, inside + room > width ? inside - room : inside + 16)}px`;
  }

  press(event) {
    const {chart} = this, step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!chart || event.ctrlKey || event.metaKey || event.altKey) return;
    if (step) {
      const {min, max} = chart.scales.x, xs = this.joined[0];
      const seen = xs.map((x, i) => i).filter(i => xs[i] >= min && xs[i] <= max);
      const at = seen.indexOf(chart.cursor.idx), next = at < 0 ? (step > 0 ? 0 : seen.length - 1) : at + step;
      const index = seen[Math.min(Math.max(next, 0), seen.length - 1)];
      if (index !== undefined)
        chart.setCursor({left: chart.valToPos(xs[index], "x"), top: chart.over.clientHeight / 2});
    } else if (event.key === "+" || event.key === "-") {
      const {clientWidth, clientHeight} = chart.over, factor = event.key === "+" ? 0.5 : 2;
      const at = chart.cursor.left >= 0 ? chart.cursor.left : clientWidth / 2;
      this.zoomTo({left: at - at * factor, top: 0, width: clientWidth * factor, height: clientHeight});
    } else if (event.key === "0") this.reset();
    else if (event.key === "Escape") chart.setCursor({left: -10, top: -10});
    else return;
    event.preventDefault();
  }

  hide(hidden) {
    this.panel.series.forEach((line, i) => {
      const on = !hidden.has(line.name) && !(isRun(line) && hidden.has(EACH_RUN));
      if (on === this.on[i]) return;
      this.on[i] = on;
      this.chart?.setSeries(i + 1, {show: on});
    });
    if (this.chart) this.show();
  }
}

function bringToLife(element) {
  const figure = {title: element.querySelector("h3").textContent, hidden: new Set()};
  const panels = JSON.parse(element.querySelector("script").textContent);
  const live = make("div", null, {className: "live"});
  const controls = make("div", live, {className: "controls"});
  controls.setAttribute("role", "group");
  controls.setAttribute("aria-label", `${figure.title}: lines and axes`);
  const place = make("div", live, {className: "panels"});
  const inRows = panels.length % 4 ? 3 : panels.length === 4 ? 2 : 4;
  place.style.setProperty("--columns", Math.min(panels.length, inRows));
  const made = panels.map(panel => new Panel(figure, panel, place));
  const button = (label, pressed, act) => {
    const made = make("button", controls, {type: "button"});
    made.append(label);
    if (pressed !== null) made.setAttribute("aria-pressed", pressed);
    made.addEventListener("click", () => {
      if (pressed !== null) made.setAttribute("aria-pressed", pressed = !pressed);
      act(pressed);
    });
    return made;
  };
  const lines = panels.flatMap(panel => panel.series);
  const names = [...new Map(lines.map(line => [line.name, line.color]).reverse())].reverse();
  if (lines.some(isRun)) names.push([EACH_RUN, null]);
  for (const [name, shade] of names.length > 1 ? names : []) {
    const toggle = button(name, true, on => {
      figure.hidden[on ? "delete" : "add"](name);
      made.forEach(panel => panel.hide(figure.hidden));
    });
    if (name !== EACH_RUN) {
      const swatch = make("i", null, {className: "swatch"});
      swatch.style.background = shade || "currentColor";
      toggle.prepend(swatch);
    }
  }
  ["x", "y"].forEach((name, axis) => {
    if (!panels.some(panel => limits(panel, axis, true)) || (axis === 0 && panels.some(panel => panel.ticks))) return;
    button(`log ${name}`, panels[0].log[axis], on => made.forEach(panel => { panel.log[axis] = on; panel.draw(); }));
  });
  button("reset zoom", null, () => made.forEach(panel => panel.reset()));
  make("span", controls, {className: "note", textContent: "drag to zoom"});
  element.querySelector("h3").after(live);
  element.classList.add("drawn");
  let width = 0;
  new ResizeObserver(() => {
    if (live.clientWidth === width) return;
    width = live.clientWidth;
    made.forEach(panel => panel.draw());
  }).observe(live);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => made.forEach(panel => panel.chart?.redraw()));
}

// A link into a closed section opens it; in print, all are open.
function reveal() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const section = target?.closest("details");
  if (section && !section.open) { section.open = true; target.scrollIntoView(); }
}

document.querySelectorAll("figure:has(script)").forEach(bringToLife);
addEventListener("hashchange", reveal);
addEventListener("click", event => { if (event.target.closest('a[href^="#"]')) setTimeout(reveal); });
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(section => { section.open = true; }));
reveal();
})();
