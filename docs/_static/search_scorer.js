// What the search of the site shows first: prose, then commands and the reference.
"use strict";

// Below every page of prose, and in their own order.
const BEHIND_PROSE = 1000;

var Scorer = {
  score: ([name, , , , score]) =>
    /^(reference|commands)\//.test(name) ? score - BEHIND_PROSE : score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
