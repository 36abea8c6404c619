// The numbers of the plan calculator: the Gaussian curve, errors of banded matrices, and fleets.
//
// Nothing here touches a page, so that the same functions run in a browser and in Node.js.
"use strict";

(() => {
  // exp(x^2) erfc(x) for x >= 0: a series below 2.5, a continued fraction above.
  function scaledErfc(x) {
    if (x < 2.5) {
      let [term, sum] = [x, x];
      for (let k = 1; term > 1e-17 * sum; k += 1) {
        term *= (2 * x * x) / (2 * k + 1);
        sum += term;
      }
      return Math.exp(x * x) - (2 / Math.sqrt(Math.PI)) * sum;
    }
    let tail = x;
    for (let k = 120; k > 0; k -= 1) tail = x + k / 2 / tail;
    return 1 / (Math.sqrt(Math.PI) * tail);
  }

  // The standard normal distribution function.
  function normalCdf(x) {
    const upper = 0.5 * Math.exp((-x * x) / 2) * scaledErfc(Math.abs(x) / Math.SQRT2);
    return x < 0 ? upper : 1 - upper;
  }

  // The least delta of the Gaussian mechanism (Balle and Wang 2018, Thm. 8).
  function deltaOf(noiseMultiplier, epsilon) {
    const near = epsilon * noiseMultiplier - 0.5 / noiseMultiplier;
    const far = epsilon * noiseMultiplier + 0.5 / noiseMultiplier;
    const scale = 0.5 * Math.exp((-near * near) / 2);
    // exp(epsilon) exp(-far^2 / 2) = exp(-near^2 / 2).
    const beyond = scale * scaledErfc(far / Math.SQRT2);
    if (near < 0) return normalCdf(-near) - beyond;
    return scale * (scaledErfc(near / Math.SQRT2) - scaledErfc(far / Math.SQRT2));
  }

  // The least number in (low, high) for which a test holds that holds for all larger ones.
  function leastNumber(low, high, holds) {
    for (let step = 0; step < 200 && high / low > 1 + 1e-13; step += 1) {
      const middle = Math.sqrt(low * high);
      if (holds(middle)) high = middle;
      else low = middle;
    }
    return high;
  }

  // The least noise multiplier of a target; 0.2 at least, as in mf_aggregators/accounting.py.
  function noiseMultiplierOf(epsilon, delta) {
    return leastNumber(0.2, 1e8, (noise) => deltaOf(noise, epsilon) <= delta);
  }

  // How often an attacker finds a client at a false positive rate of 1 %.
  function truePositiveRateOf(noiseMultiplier) {
    return normalCdf(-2.3263478740408408 + 1 / noiseMultiplier);
  }

  // The first coefficients of (1 - x)^(-1/2).
  function rootCoefficients(number) {
    const found = new Float64Array(number).fill(1);
    for (let k = 1; k < number; k += 1) found[k] = (found[k - 1] * (k - 0.5)) / k;
    return found;
  }

  // The squared sensitivity of one participation, and the variance by round of prefix sums, of a
  // banded square root.
  function bandedErrors(numRounds, numBands) {
    const bands = rootCoefficients(numBands);
    const decoder = new Float64Array(numRounds);
    const variances = new Float64Array(numRounds);
    let [norm, variance] = [0, 0];
    for (const band of bands) norm += band * band;
    for (let i = 0; i < numRounds; i += 1) {
      let entry = 1;
      const most = Math.min(i, numBands - 1);
      for (let k = 1; k <= most; k += 1) entry -= bands[k] * decoder[i - k];
      decoder[i] = entry;
      variance += entry * entry;
      variances[i] = norm * variance;
    }
    return variances;
  }

  const mean = (numbers) => numbers.reduce((sum, each) => sum + each, 0) / numbers.length;
  const errorsKnown = new Map();

  // The mean variance of the best banded square root of at most `separation` bands, for one
  // participation: the best of 1, 2, 4, ... and all bands, as mf-plan ranks separations.
  function bestBandedVariance(numRounds, separation) {
    const widest = Math.min(separation, numRounds);
    const key = `${numRounds},${widest}`;
    if (!errorsKnown.has(key)) {
      const tried = [widest];
      for (let bands = 1; bands < widest; bands *= 2) tried.push(bands);
      const means = tried.map((bands) => mean(bandedErrors(numRounds, bands)));
      errorsKnown.set(key, Math.min(...means));
    }
    return errorsKnown.get(key);
  }

  function mostParticipations(numRounds, schema) {
    const fits = Math.ceil(numRounds / schema.separation);
    return schema.most === null ? fits : Math.min(fits, schema.most);
  }

  // The RMSE of prefix sums at noise multiplier 1 under a schema.
  function bandedNoise(numRounds, schema) {
    const times = mostParticipations(numRounds, schema);
    return Math.sqrt(times * bestBandedVariance(numRounds, schema.separation));
  }

  // A source of randomness (the algorithm sfc32), uniform in [0, 1).
  function uniformsOf(seed) {
    let [a, b, c, counter] = [0x9e3779b9, 0x243f6a88, seed | 0, 1];
    const next = () => {
      const sum = (((a + b) | 0) + counter) | 0;
      counter = (counter + 1) | 0;
      a = b ^ (b >>> 9);
      b = (c + (c << 3)) | 0;
      c = (c << 21) | (c >>> 11);
      c = (c + sum) | 0;
      return (sum >>> 0) / 4294967296;
    };
    for (let k = 0; k < 15; k += 1) next();
    return next;
  }

  // Draws of the distributions that fleets need. Those of a variance above 25 are rounded normals.
  function drawsOf(seed) {
    const uniform = uniformsOf(seed);
    function normal() {
      return Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
    }
    // Marsaglia and Tsang 2000.
    function gamma(shape) {
      if (shape < 1) return gamma(shape + 1) * Math.pow(1 - uniform(), 1 / shape);
      const d = shape - 1 / 3;
      for (;;) {
        const x = normal();
        const v = Math.pow(1 + x / Math.sqrt(9 * d), 3);
        if (v > 0 && Math.log(1 - uniform()) < 0.5 * x * x + d - d * v + d * Math.log(v)) {
          return d * v;
        }
      }
    }
    function beta(a, b) {
      const [x, y] = [gamma(a), gamma(b)];
      return x / (x + y);
    }
    const within = (value, low, high) => Math.min(high, Math.max(low, value));
    function near(average, variance, low, high) {
      return within(Math.round(average + Math.sqrt(variance) * normal()), low, high);
    }
    function binomial(number, probability) {
      if (number === 0 || probability <= 0) return 0;
      if (probability >= 1) return number;
      if (probability > 0.5) return number - binomial(number, 1 - probability);
      const variance = number * probability * (1 - probability);
      if (variance > 25) return near(number * probability, variance, 0, number);
      const odds = probability / (1 - probability);
      let [left, mass] = [uniform(), Math.exp(number * Math.log1p(-probability))];
      let found = 0;
      while (left > mass && found < number) {
        left -= mass;
        mass *= (odds * (number - found)) / (found + 1);
        found += 1;
      }
      return found;
    }
    // Of `taken` devices out of good + bad ones, the good ones.
    function hypergeometric(good, bad, taken) {
      const [low, high] = [Math.max(0, taken - bad), Math.min(good, taken)];
      if (low === high) return low;
      const all = good + bad;
      const average = (taken * good) / all;
      const variance = (average * (bad / all) * (all - taken)) / (all - 1);
      if (variance > 25) return near(average, variance, low, high);
      // From the most likely number to both sides.
      const top = within(Math.floor(((taken + 1) * (good + 1)) / (all + 2)), low, high);
      const up = (k) => ((good - k) * (taken - k)) / ((k + 1) * (bad - taken + k + 1));
      let total = 1;
      const masses = [[top, 1]];
      for (let [k, mass] = [top, 1]; k < high && mass > 1e-12; k += 1) {
        mass *= up(k);
        total += mass;
        masses.push([k + 1, mass]);
      }
      for (let [k, mass] = [top, 1]; k > low && mass > 1e-12; k -= 1) {
        mass /= up(k - 1);
        total += mass;
        masses.push([k - 1, mass]);
      }
      let left = uniform() * total;
      for (const [k, mass] of masses) {
        left -= mass;
        if (left <= 0) return k;
      }
      return top;
    }
    return { uniform, beta, binomial, hypergeometric };
  }

  window.planNumbers = {
    deltaOf,
    noiseMultiplierOf,
    truePositiveRateOf,
    bandedErrors,
    bestBandedVariance,
    bandedNoise,
    mostParticipations,
    drawsOf,
  };
})();
