// What is searched for, and how the pages that it finds are ranked: what people do comes before how it is made.

// The words of a question are on no page that answers it.
var splitQuery = (query) =>
  query
    .split(/[^\p{Letter}\p{Number}_\p{Emoji_Presentation}]+/gu)
    .filter((word) => word && !/^(how|what|which|where|when|why|do|does|did|can|i|my|we|our)$/i.test(word));

//
// Sphinx's figures, but for `score`. Pages that say what they are found by (`found by:`) have a hundred.
var Scorer = {
  score: ([page, , , , score, , kind]) => {
    const aside = /^(decisions\/|changelog$|architecture$|reliability$|protocol|format$|genindex)/.test(page);
    const part = kind === "object" && !/[._A-Z]/.test(new URLSearchParams(location.search).get("q") ?? "");
    return score + (page.startsWith("start/") ? 3 : page.startsWith("howto/") ? 2 : 0) - (aside || part ? 15 : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
