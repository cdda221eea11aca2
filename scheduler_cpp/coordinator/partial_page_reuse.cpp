// Partial pages: the last, unfinished prefix page that an ended request leaves, and what a later prompt copies of it.
//
// The page's blocks become blocks of the index like those of whole pages, under keys of their own. Nobody shares them:
// each continuation completes the page with other tokens and publishes it under another key, so it copies the rows that
// it reads into blocks of its own. What a hit leaves behind keeps its age: its rows live on in their continuation.

#include <algorithm>
#include <cstddef>
#include <utility>
#include <variant>

#include "coordinator/cache_coordinator.h"
#include "core/check.h"

namespace tokenspeed {
namespace {

CacheKey KeyOf(const PrefixHash& name, const CacheGroup& group, int32_t page_offset) {
  return {.content_hash = name, .namespace_id = kPartialPages, .group_id = group.group_id(), .page_offset = page_offset};
}

int32_t CommonTokens(std::span<const int32_t> a, std::span<const int32_t> b) {
  return static_cast<int32_t>(std::ranges::mismatch(a, b).in1 - a.begin());
}

}  // namespace

int32_t CacheCoordinator::TokensCovered(const PrefixHash& name, int32_t begin, int32_t num_tokens) const {
  for (std::size_t g = 0; g < groups_.size() && num_tokens > 0; ++g) {
    const GroupGeometry& geometry = groups_[g].geometry();
    const int32_t first_of_page = begin / geometry.block_granularity();
    const int32_t end = geometry.EndOfReadBlocks(begin + num_tokens);
    for (int32_t slot = geometry.FirstReadBlock(begin, begin + num_tokens); slot < end; ++slot) {
      if (groups_[g].index().Contains(pool_, KeyOf(name, groups_[g], slot - first_of_page))) continue;
      // Whoever resumes in front of this block may read older ones, so the groups are asked again.
      return TokensCovered(name, begin, slot * geometry.block_granularity() - begin);
    }
  }
  return std::max(num_tokens, 0);
}

void CacheCoordinator::ProbePartialPage(PrefixProbe& probe, const PrefixHash& prior,
                                        std::span<const int32_t> tokens) const {
  const std::span<const PartialPages::Page> pages = partial_pages_.Behind(prior);
  for (auto page = pages.rbegin(); page != pages.rend(); ++page) {
    const int32_t common = CommonTokens(page->tokens, tokens);
    if (common <= probe.partial.num_tokens) continue;
    const int32_t covered = TokensCovered(page->name, probe.prefix_tokens(), common);
    if (covered > probe.partial.num_tokens) probe.partial = {.name = page->name, .num_tokens = covered};
  }
}

void CacheCoordinator::CachePartialPage(std::span<BlockTable> tables, const PrefixHash& prior, int32_t begin,
                                        std::span<const int32_t> tokens, uint64_t access_epoch) {
  CheckShapes(tables);
  TOKENSPEED_CHECK(begin % prefix_granularity_ == 0 && !tokens.empty() &&
                       tokens.size() < static_cast<std::size_t>(prefix_granularity_),
                   "a partial page starts at a boundary and ends before the next");
  const PrefixHash name = PartialPages::NameOf(prior, tokens);
  std::vector<CacheKey> keys;
  std::vector<CacheKey> new_keys;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const GroupGeometry& geometry = groups_[g].geometry();
    TOKENSPEED_CHECK(geometry.HoldsRows() && groups_[g].SharesPrefixes(), "a partial page of a group that has none");
    const int32_t first = begin / geometry.block_granularity();
    const int32_t end = (begin + static_cast<int32_t>(tokens.size()) - 1) / geometry.block_granularity() + 1;
    keys.clear();
    for (int32_t slot = first; slot < end; ++slot) keys.push_back(KeyOf(name, groups_[g], slot - first));
    groups_[g].index().RegisterFullBlocks(pool_, groups_[g].allocator().BlocksToPublish(tables[g], first, end - first),
                                          keys, access_epoch, first, BoundaryKind::kEndpoint, new_keys);
  }
  partial_pages_.Leave(prior, name, tokens, static_cast<int32_t>(new_keys.size()));
  const std::span<const PartialPages::Page> pages = partial_pages_.Behind(prior);
  if (pages.size() > kMaxPartialPagesBehindOne) WithdrawPartialPage(PrefixHash(pages.front().name));
}

void CacheCoordinator::WithdrawPartialPage(const PrefixHash& name) {
  for (CacheGroup& group : groups_) {
    for (int32_t offset = 0; offset < group.geometry().BlocksPerPrefixPage(); ++offset) {
      const CacheBlockRef block = group.index().Find(pool_, KeyOf(name, group, offset));
      if (block && group.index().Withdraw(pool_, block->Location())) partial_pages_.ForgetBlock(name);
    }
  }
}

std::vector<TokenDemand> CacheCoordinator::DemandsInsidePage(const PrefixProbe& probe,
                                                             std::span<const TokenDemand> demands) const {
  std::vector<TokenDemand> inside(demands.begin(), demands.end());
  const int32_t begin = probe.prefix_tokens();
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const GroupGeometry& geometry = groups_[g].geometry();
    const int32_t first = geometry.FirstReadBlock(begin, probe.resume_tokens());
    // What is below the window is left out, for its rows would never be written.
    if (first == begin / geometry.block_granularity()) continue;
    inside[g].extent = SparseSuffix{.extent_tokens = begin + std::get<DenseGrowth>(demands[g].extent).num_tokens,
                                    .first_block = first};
  }
  return inside;
}

std::vector<std::vector<CacheKey>> CacheCoordinator::CopiedKeys(const PrefixProbe& probe) const {
  if (probe.partial.num_tokens == 0) return {};
  std::vector<std::vector<CacheKey>> keys(groups_.size());
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const GroupGeometry& geometry = groups_[g].geometry();
    const int32_t first_of_page = probe.prefix_tokens() / geometry.block_granularity();
    const int32_t end = geometry.EndOfReadBlocks(probe.resume_tokens());
    for (int32_t slot = geometry.FirstReadBlock(probe.prefix_tokens(), probe.resume_tokens()); slot < end; ++slot) {
      keys[g].push_back(KeyOf(probe.partial.name, groups_[g], slot - first_of_page));
    }
  }
  return keys;
}

void CacheCoordinator::CopyPartialPage(std::span<const CacheKey> keys, std::size_t g, AdmissionResult& result) const {
  const GroupAllocator& allocator = groups_[g].allocator();
  std::vector<int32_t>& acquired = result.new_block_ids[g];
  TOKENSPEED_CHECK(keys.size() <= acquired.size(), "a copied block has nowhere to go");
  std::vector<BlockCopy>& copies = result.copies.emplace_back();
  for (std::size_t i = 0; i < keys.size(); ++i) {
    CacheBlockRef source = groups_[g].index().Find(pool_, keys[i]);
    TOKENSPEED_CHECK(bool(source), "a probe is used after its blocks were evicted");
    copies.push_back({.source = allocator.BlockId(source), .destination = acquired[i]});
    result.copied_blocks.push_back(std::move(source));
  }
  acquired.erase(acquired.begin(), acquired.begin() + static_cast<std::ptrdiff_t>(keys.size()));
}

}  // namespace tokenspeed
