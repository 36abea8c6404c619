// The plan calculator: shows plans of the grid in plan-grid.js, which mf-plan's planner computed.
"use strict";

(() => {
  const grid = window.planGrid;
  const page = document.getElementById("plan-calculator");
  if (!grid || !page) return;
  const fields = ["rounds", "population", "clients", "epsilon"];
  const options = {
    rounds: grid.rounds,
    population: grid.populations,
    clients: grid.clients_per_round,
    epsilon: grid.epsilons,
  };
  const first = { rounds: 500, population: 100000, clients: 1000, epsilon: 8 };
  const number = (value) => value.toLocaleString("en");
  const digits = (value) => String(Number(value.toPrecision(4)));

  for (const name of fields) {
    const select = page.querySelector(`select[name=${name}]`);
    for (const value of options[name]) {
      const option = new Option(number(value), value);
      option.selected = value === first[name];
      select.add(option);
    }
    // What the grid does not have is typed.
    select.add(new Option("another", ""));
    const input = document.createElement("input");
    Object.assign(input, { type: "number", name, min: 0, step: "any", hidden: true });
    const label = select.parentElement.firstChild.textContent.trim();
    input.setAttribute("aria-label", `${label}, another number`);
    select.after(input);
    select.addEventListener("change", () => {
      input.hidden = select.value !== "";
      show();
    });
    input.addEventListener("input", show);
  }

  // What was chosen or typed; 0 for nothing.
  function valueOf(name) {
    const select = page.querySelector(`select[name=${name}]`);
    return Number(select.value || page.querySelector(`input[name=${name}]`).value);
  }

  // The power of ten below one over a population, as plan_grid.delta_of has it.
  function deltaOf(population) {
    return `1e-${String(population).length.toString().padStart(2, "0")}`;
  }

  function commandOf(rounds, population, clients, epsilon) {
    return (
      `mf-plan --num_rounds=${rounds} --population=${population} \\\n` +
      `  --clients_per_round=${clients} --target_epsilon=${epsilon} \\\n` +
      `  --delta=${deltaOf(population)} --model_size=${grid.model_size}`
    );
  }

  // Why there is no plan of a setting on the page; nothing if there is one.
  function whyOutside(rounds, population, clients, epsilon) {
    const isWhole = [rounds, population, clients].every((each) => Number.isSafeInteger(each));
    if (!isWhole || Math.min(rounds, clients, epsilon) <= 0 || clients > population) {
      return (
        "Type whole numbers above 0, and no more clients per round than the population has; " +
        "epsilon may be any number above 0."
      );
    }
    const chosen = { rounds, population, clients, epsilon };
    const missing = fields.filter((name) => !options[name].includes(chosen[name]));
    const known = (name) => {
      const unit = { rounds: "rounds", population: "clients", clients: "clients per round" }[name];
      const numbers = options[name].map(number);
      const listed = `${numbers.slice(0, -1).join(", ")} and ${numbers[numbers.length - 1]}`;
      return unit ? `${listed} ${unit}` : `${name} ${listed}`;
    };
    return missing.length
      ? `This page has no plan for it, only for ${missing.map(known).join("; ")}. Run:`
      : "";
  }

  // Exponential numbers as Python writes them, which the keys of the grid have.
  function exponential(value) {
    const [digit, power] = value.toExponential().split("e-");
    return `${digit}e-${power.padStart(2, "0")}`;
  }

  // The plan of a setting: candidates with their effective RMSE, and the guarantee.
  function planOf(rounds, population, clients, epsilon) {
    const separation = Math.min(rounds, Math.floor(population / clients));
    const delta = grid.deltas[population];
    const found = grid.plans[`${rounds},${separation}`];
    const guarantee = grid.guarantees[`${epsilon},${exponential(delta)}`];
    const scale = guarantee.noise_multiplier / clients;
    return {
      separation,
      delta,
      participations: Math.ceil(rounds / separation),
      noiseMultiplier: guarantee.noise_multiplier,
      truePositiveRate: guarantee.true_positive_rate,
      recommended: found.recommended,
      candidates: found.candidates.map((each) => ({
        ...each,
        effectiveRmse: each.rmse * scale,
        gigabytes: (each.bytes * grid.model_size) / 1e9,
        deviations: each.curve && each.curve.map((value) => value * scale),
      })),
    };
  }
  window.planOf = planOf;

  function element(name, attributes, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  // Curves, each a colour and points [x, y], in a panel as wide as a phone.
  function draw(id, title, below, beside, curves, logarithmic) {
    const [left, right, top, bottom, width, height] = [58, 18, 26, 40, 400, 260];
    const scaled = (value) => (logarithmic ? Math.log(value) : value);
    const all = curves.flatMap((curve) => curve.points);
    const xs = all.map(([x]) => scaled(x));
    const [low, high] = [Math.min(...xs), Math.max(...xs)];
    const most = Math.max(...all.map(([, y]) => y));
    const x = (value) => left + ((scaled(value) - low) / (high - low)) * (width - left - right);
    const y = (value) => height - bottom - (value / most) * (height - top - bottom);
    const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    const text = (words, attributes) => svg.append(element("text", attributes, words));
    text(title, { x: width / 2, y: 16, "text-anchor": "middle", class: "title" });
    text(below, { x: (left + width) / 2, y: height - 6, "text-anchor": "middle" });
    text(beside, {
      x: 0, y: 0, "text-anchor": "middle",
      transform: `translate(12 ${(top + height - bottom) / 2}) rotate(-90)`,
    });
    const step = 10 ** Math.floor(Math.log10(most));
    const tick = most / step < 2 ? step / 4 : most / step < 5 ? step / 2 : step;
    for (let value = 0; value <= most; value += tick) {
      svg.append(element("path", { d: `M${left} ${y(value)}H${width - right}`, class: "grid" }));
      text(digits(value), { x: left - 5, y: y(value) + 4, "text-anchor": "end" });
    }
    const ends = logarithmic
      ? grid.epsilons.filter((each) => [0.5, 1, 2, 4, 8, 16].includes(each))
      : [0, 0.25, 0.5, 0.75, 1].map((share) => Math.round(low + share * (high - low)));
    for (const value of ends) {
      text(number(value), { x: x(value), y: height - bottom + 16, "text-anchor": "middle" });
    }
    svg.append(element("path", { d: `M${left} ${top}V${height - bottom}H${width - right}`, class: "axis" }));
    for (const { colour, points } of curves) {
      const line = points.map(([place, value]) => `${x(place).toFixed(1)},${y(value).toFixed(1)}`);
      svg.append(element("polyline", { points: line.join(" "), stroke: colour, class: "curve" }));
    }
    document.getElementById(id).replaceChildren(svg);
  }

  function show() {
    const chosen = fields.map(valueOf);
    const [rounds, population, clients, epsilon] = chosen;
    const why = whyOutside(...chosen);
    document.getElementById("plan-outside").textContent = why;
    document.getElementById("plan-inside").hidden = why !== "";
    document.getElementById("plan-run").hidden = why.startsWith("Type");
    document.getElementById("plan-command").textContent = commandOf(...chosen);
    if (why) return;
    const plan = planOf(...chosen);
    const best = plan.candidates.find((each) => each.name === plan.recommended);
    const times = plan.participations === 1 ? "once" : `${plan.participations} times`;
    const words = {
      recommended: plan.recommended,
      participation:
        `Each client takes part at most ${times}` +
        (plan.participations === 1 ? "" : `, at least ${plan.separation} rounds apart`) + ".",
      guarantee:
        `Noise multiplier ${digits(plan.noiseMultiplier)} makes (${epsilon}, ` +
        `${exponential(plan.delta)})-differential privacy for each client: an attacker finds at ` +
        `most ${digits(100 * plan.truePositiveRate)}\u00a0% of them at ` +
        `${100 * grid.false_positive_rate}\u00a0% false positives.`,
      command: `${commandOf(...chosen)} \\\n  --separation=${Math.min(chosen[0], Math.floor(chosen[1] / chosen[2]))} --mechanisms=${grid.mechanisms.join(",")}`,
    };
    for (const [name, value] of Object.entries(words)) {
      document.getElementById(`plan-${name}`).textContent = value;
    }
    const rows = plan.candidates.map((each) => {
      const row = document.createElement("tr");
      const cells = [
        each.name,
        digits(each.effectiveRmse),
        digits(each.rmse),
        digits(each.gigabytes),
        each === best ? "recommended" : `${digits(each.effectiveRmse / best.effectiveRmse)} times`,
      ];
      for (const cell of cells) row.insertCell().textContent = cell;
      return row;
    });
    document.getElementById("plan-candidates").replaceChildren(...rows);
    const drawn = plan.candidates.filter((each) => each.deviations);
    const colour = (each) => grid.colours[each.kind];
    const places = grid.places[rounds];
    draw("plan-by-round", "Noise in the model", "round", "clip norms", drawn.map((each) => ({
      colour: colour(each),
      points: each.deviations.map((value, place) => [places[place] + 1, value]),
    })), false);
    draw("plan-by-epsilon", "The same for other epsilons", "epsilon", "effective RMSE",
      drawn.map((each) => ({
        colour: colour(each),
        points: grid.epsilons.map((other) => [
          other,
          planOf(rounds, population, clients, other).candidates.find(
            (candidate) => candidate.name === each.name
          ).effectiveRmse,
        ]),
      })), true);
    const names = drawn.map((each) => {
      const item = document.createElement("li");
      const mark = document.createElement("span");
      mark.style.background = colour(each);
      item.append(mark, each.name);
      return item;
    });
    document.getElementById("plan-legend").replaceChildren(...names);
  }

  show();
})();
