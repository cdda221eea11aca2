#include "prefix/partial_pages.h"

#include <algorithm>

#include "core/check.h"

namespace tokenspeed {

std::span<const PartialPages::Page> PartialPages::Behind(const PrefixHash& prior) const {
  const auto found = behind_.find(prior);
  return found == behind_.end() ? std::span<const Page>() : found->second;
}

void PartialPages::Leave(const PrefixHash& prior, const PrefixHash& name, std::span<const int32_t> tokens,
                         int32_t num_new_blocks) {
  if (prior_of_.contains(name)) {
    std::vector<Page>& pages = behind_.at(prior);
    const auto known = std::ranges::find(pages, name, &Page::name);
    known->num_blocks += num_new_blocks;
    std::rotate(known, known + 1, pages.end());
  } else if (num_new_blocks > 0) {
    behind_[prior].push_back({.name = name, .tokens = {tokens.begin(), tokens.end()}, .num_blocks = num_new_blocks});
    prior_of_.emplace(name, prior);
  }
}

void PartialPages::ForgetBlock(const PrefixHash& name) {
  const auto prior = prior_of_.find(name);
  TOKENSPEED_CHECK(prior != prior_of_.end(), "a block of an unknown partial page was cached");
  const auto behind = behind_.find(prior->second);
  std::vector<Page>& pages = behind->second;
  const auto page = std::ranges::find(pages, name, &Page::name);
  if (--page->num_blocks > 0) return;
  pages.erase(page);
  if (pages.empty()) behind_.erase(behind);
  prior_of_.erase(prior);
}

}  // namespace tokenspeed
