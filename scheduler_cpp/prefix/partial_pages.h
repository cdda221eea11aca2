// PartialPages: which beginnings of prefix pages are cached, by what precedes them.
//
// A partial page is what a prompt and its continuation left of the prefix page in which they ended. Behind the same
// prior pages, its rows serve every prompt that starts with one or more of its tokens.
//
// Invariants:
// - A page is known for as long as at least one block is cached under its name; whoever caches and evicts tells.
// - No name is that of a whole prefix page of the same cache: both hash the number of their tokens.
// - Pages behind one prior stand in the order in which they were last left, the oldest first.
//
// Ownership: values only. Thread safety: none.
// Costs: all O(pages behind one prior), of which the owner keeps few, and their tokens.

#ifndef TOKENSPEED_PREFIX_PARTIAL_PAGES_H_
#define TOKENSPEED_PREFIX_PARTIAL_PAGES_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <unordered_map>
#include <vector>

#include "prefix/prefix_hasher.h"

namespace tokenspeed {

class PartialPages {
 public:
  struct Page {
    PrefixHash name;
    std::vector<int32_t> tokens;
    int32_t num_blocks = 0;  // cached under the name
  };

  // The name of the page of these tokens behind `prior`.
  static PrefixHash NameOf(const PrefixHash& prior, std::span<const int32_t> tokens) {
    return HashPrefixPage(tokens, prior);
  }

  // The pages behind `prior`; valid until the next change.
  std::span<const Page> Behind(const PrefixHash& prior) const;

  // The page of this name was left, perhaps once more, and `num_new_blocks` blocks have been cached under it that were
  // not before. A page of which nothing is cached does not become known.
  void Leave(const PrefixHash& prior, const PrefixHash& name, std::span<const int32_t> tokens, int32_t num_new_blocks);
  // A block is cached under this name no longer. The page must be known.
  void ForgetBlock(const PrefixHash& name);

 private:
  struct Hasher {
    std::size_t operator()(const PrefixHash& hash) const noexcept {
      std::size_t word;
      std::memcpy(&word, hash.bytes.data(), sizeof(word));
      return word;
    }
  };

  std::unordered_map<PrefixHash, std::vector<Page>, Hasher> behind_;
  std::unordered_map<PrefixHash, PrefixHash, Hasher> prior_of_;  // by name
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_PREFIX_PARTIAL_PAGES_H_
