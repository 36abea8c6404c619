// Simulated fleets for the plan calculator: the separation and the number of participations with
// the least noise that 95 of 100 fleets survive, as mf_aggregators/planning/fleets.py finds them.
"use strict";

(() => {
  const { bandedNoise, drawsOf, mostParticipations } = window.planNumbers;
  // The defaults and limits of planning/fleets.py.
  const [SPREAD, PERSISTENCE, INTERRUPTIONS, SLOWER] = [0.25, 0.8, 0.01, 0.1];
  const [SIMULATIONS, MOST_FAILURES, MOST_ATTEMPTS, MOST_KINDS] = [100, 5, 100, 100000];
  const RETRY_ROUNDS = 1;
  const [STEPS, MORE, MOST_TRIED, COST_OF_FAILURE] = [64, 4, 6, 10];
  // Clocks of kernel/ledger.py: their drift, and minutes of margin.
  const [CLOCK_DRIFT, CLOCK_MARGIN] = [0.001, 10];
  // Between two steps of a search the page can answer its reader.
  const pause = () => new Promise((done) => setTimeout(done, 0));

  function logGamma(x) {
    let shift = 0;
    for (; x < 12; x += 1) shift -= Math.log(x);
    const series = 1 / (12 * x) - 1 / (360 * x ** 3) + 1 / (1260 * x ** 5) - 1 / (1680 * x ** 7);
    return shift + (x - 0.5) * Math.log(x) - x + 0.5 * Math.log(2 * Math.PI) + series;
  }

  function betaParameters(mean, spread) {
    const total = (mean * (1 - mean)) / (spread * Math.min(mean, 1 - mean)) ** 2 - 1;
    return [mean * total, (1 - mean) * total];
  }

  // The probability of at most `most` dropouts among the selected devices (beta-binomial).
  function chanceOfAttempt(selected, most, dropout) {
    const [a, b] = betaParameters(dropout, SPREAD);
    const logBeta = (x, y) => logGamma(x) + logGamma(y) - logGamma(x + y);
    let [logMass, sum] = [logBeta(a, selected + b) - logBeta(a, b), 0];
    for (let k = 0; k <= most; k += 1) {
      sum += Math.exp(logMass);
      logMass += Math.log(((selected - k) * (k + a)) / ((k + 1) * (selected - k - 1 + b)));
    }
    return Math.min(sum, 1);
  }

  // The selected devices of a round with which few timers start for each summed round.
  function selectedOf(clients, dropout) {
    if (dropout === 0) return clients;
    const most = Math.ceil((4 * clients) / (1 - dropout)) + 20;
    let [best, least] = [clients, Infinity];
    for (let k = 0; k < 400; k += 1) {
      const selected = Math.trunc(clients + (k * (most - clients)) / 399);
      const failures = 1 / chanceOfAttempt(selected, selected - clients, dropout) - 1;
      const cost = selected * (1 + COST_OF_FAILURE * failures);
      if (cost < least) [best, least] = [selected, cost];
      // Beyond the optimum, more devices only cost more.
      if (selected > 2 * least) break;
    }
    const perUpload = Math.ceil((100 * best) / clients) / 100;
    return Math.ceil(Number((perUpload * clients).toFixed(6)));
  }

  // The separation that timers of hours enforce while rounds take up to a tenth longer.
  function separationOfHours(numRounds, timerHours, roundMinutes) {
    const minutes = roundMinutes * (1 + SLOWER);
    const timer = 60 * timerHours * (1 - CLOCK_DRIFT) - CLOCK_MARGIN;
    if (minutes >= timer) return 0;
    return Math.min(numRounds, Math.ceil(timer / minutes - 1 - 1e-9));
  }

  // Whether one simulated fleet comes to its last round.
  function comesToItsEnd(fleet, numRounds, schema, draws) {
    const { clients, selected, returning, absentRounds, timerHours, roundMinutes } = fleet;
    const byHours = timerHours !== null;
    const drawn = (mean) => (mean === 0 ? 0 : draws.beta(...betaParameters(mean, SPREAD)));
    let dropout = drawn(fleet.dropout);
    const kinds = schema.most === null ? 1 : schema.most;
    const eligible = new Float64Array(kinds);
    eligible[0] = fleet.population;
    let total = eligible[0];
    // Of these, the devices that are still away after their timers.
    const away = new Float64Array(kinds);
    let allAway = 0;
    // The time in rounds; and when timers of each round run out if all later attempts are summed.
    let [passed, time, due] = [1, 0, []];
    // Slots of time after which a device may join again, and until which a guarantee counts.
    const counted = byHours ? Math.ceil((60 * timerHours) / roundMinutes - 1) : 0;
    const slots = byHours ? 2 * numRounds + 100 : numRounds;
    const wait = byHours ? Math.ceil((60 * timerHours) / roundMinutes + 1) : schema.separation;
    // A device that waits longer than all slots does not come back.
    const after = Math.min(wait, slots + 1);
    const waiting = Array.from({ length: after }, () => new Float64Array(kinds));
    const before = [];
    let rounds = 0;
    for (let slot = 0; slot < slots && rounds < numRounds; slot += 1) {
      const place = waiting[slot % after];
      due.push(time + schema.separation);
      const late = byHours ? 0 : Math.max(0, time - due[Math.max(0, slot - schema.separation)]);
      for (let kind = 0; kind < kinds; kind += 1) {
        eligible[kind] += place[kind];
        total += place[kind];
        if (absentRounds === 0) continue;
        const absent = draws.binomial(place[kind], 0.5 ** (late / absentRounds));
        away[kind] += absent;
        allAway += absent;
      }
      place.fill(0);
      if (byHours) {
        before.push(rounds);
        const then = slot - counted;
        const isRound = then >= 0 && before[then + 1] > before[then];
        if (isRound && rounds - before[then] < schema.separation) return false;
      }
      let isSummed = false;
      for (let attempt = 0; !isSummed && attempt < (byHours ? 1 : MOST_ATTEMPTS); attempt += 1) {
        if (!byHours && total < clients) return false;
        for (let kind = 0; allAway > 0 && kind < kinds; kind += 1) {
          const back = draws.binomial(away[kind], 1 - 0.5 ** (passed / absentRounds));
          away[kind] -= back;
          allAway -= back;
        }
        if (draws.uniform() >= PERSISTENCE) dropout = drawn(fleet.dropout);
        const available = draws.binomial(total - allAway, returning);
        passed = available < clients ? RETRY_ROUNDS : 1;
        time += passed;
        if (available < clients) continue;
        let uploads = draws.binomial(Math.min(available, selected), 1 - dropout);
        isSummed = uploads >= clients && draws.uniform() >= INTERRUPTIONS;
        let left = total - allAway;
        total -= uploads;
        for (let kind = 0; uploads > 0; kind += 1) {
          const here = eligible[kind] - away[kind];
          left -= here;
          const taken = draws.hypergeometric(here, left, uploads);
          uploads -= taken;
          eligible[kind] -= taken;
          // The last kind has no other participation to come.
          if (schema.most === null) place[0] += taken;
          else if (kind + 1 < kinds) place[kind + 1] += taken;
        }
      }
      if (!isSummed && !byHours) return false;
      rounds += isSummed ? 1 : 0;
    }
    return rounds === numRounds;
  }

  function survives(fleet, numRounds, schema, seed) {
    let failures = 0;
    for (let each = 0; each < SIMULATIONS && failures <= MOST_FAILURES; each += 1) {
      failures += !comesToItsEnd(fleet, numRounds, schema, drawsOf(1000 * seed + each));
    }
    return failures <= MOST_FAILURES;
  }

  // The largest number of a range for which a decreasing test holds, to 2 %, or 0.
  async function largest(low, high, holds) {
    if (high < low) return 0;
    const step = Math.max(1, Math.floor((high - low) / STEPS));
    let [first, last] = [0, Math.floor((high - low) / step) + 1];
    while (first < last) {
      const middle = Math.floor((first + last) / 2);
      await pause();
      if (holds(low + step * middle)) first = middle + 1;
      else last = middle;
    }
    return first ? low + step * (first - 1) : 0;
  }

  // The schemas that the devices survive, by increasing noise; none if the rounds starve.
  async function choose(given, numRounds, seed = 0) {
    const fleet = { ...given, selected: selectedOf(given.clients, given.dropout) };
    const { population, clients, timerHours, roundMinutes } = fleet;
    // Devices come and go independently; they may also stay away for some rounds after timers.
    const laws = [{ ...fleet, absentRounds: 0 }];
    if (fleet.absentRounds > 0) laws.unshift({ ...fleet, returning: 1 });
    const survive = (most, separation) =>
      laws.every((law) => survives(law, numRounds, { separation, most }, seed));
    const noiseOf = (schema) => bandedNoise(numRounds, schema);
    let high = Math.min(numRounds, Math.floor(population / clients));
    if (timerHours !== null) high = separationOfHours(numRounds, timerHours, roundMinutes);
    let separation = high;
    if (!high || !survive(null, high)) {
      separation = await largest(1, high - 1, (each) => survive(null, each));
    }
    if (separation === 0) return [];
    const schemas = [{ separation, most: null }];
    const fits = mostParticipations(numRounds, schemas[0]);
    if (fits * numRounds <= MOST_KINDS) {
      let fewest = Math.ceil((numRounds * clients) / population);
      const least = fewest;
      const fewestOf = async (apart) =>
        -(await largest(-fits + 1, -least, (k) => survive(-k, apart))) || fits;
      let most = await fewestOf(timerHours === null ? separation : 1);
      const step = Math.max(1, Math.floor((fits - most) / MORE));
      for (let each = most; each < fits; each += step) schemas.push({ separation, most: each });
      if (timerHours !== null) fewest = most;
      else if (separation > 1) {
        // The largest separation may just survive, and not with any limit.
        const fewer = await fewestOf(separation - 1);
        if (fewer < most) {
          [separation, most] = [separation - 1, fewer];
          schemas.push({ separation, most });
        }
      }
      const first = noiseOf(schemas[0]);
      for (let fewer = most - 1; fewer >= Math.max(fewest, most - MOST_TRIED); fewer -= 1) {
        const isWorse = (each) => noiseOf({ separation: each, most: fewer }) > first;
        const low = 1 + (await largest(1, separation, isWorse));
        separation = await largest(low, separation, (each) => survive(fewer, each));
        if (separation < low) break;
        schemas.push({ separation, most: fewer });
      }
    }
    return schemas.sort((one, other) => noiseOf(one) - noiseOf(other));
  }

  window.planFleets = { choose, selectedOf, separationOfHours, survives };
})();
