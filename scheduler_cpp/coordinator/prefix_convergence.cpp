#include "coordinator/prefix_convergence.h"

#include <algorithm>

namespace tokenspeed {
namespace {

// One group's probe, and the tokens it covers.
struct GroupMatch {
  PrefixMask mask;
  int32_t extent_tokens = 0;
};

GroupMatch Match(const CacheGroup& group, const TierProbe& tier, std::span<const CacheKey> keys,
                 int32_t bound_tokens) {
  const int32_t granularity = group.geometry().block_granularity();
  const int32_t floor = tier.floor_tokens / granularity;
  GroupMatch match;
  match.mask = MatchPrefix(group.geometry().Matching(), group.index(), tier.pool,
                           keys.subspan(static_cast<std::size_t>(floor)), bound_tokens / granularity - floor,
                           tier.stored);
  match.extent_tokens = tier.floor_tokens + static_cast<int32_t>(match.mask.size()) * granularity;
  return match;
}

}  // namespace

ConvergedPrefix ConvergePrefix(std::span<const CacheGroup> groups, const TierProbe& tier,
                               std::span<const std::vector<CacheKey>> keys, int32_t num_prefix_pages,
                               int32_t prefix_granularity, MatchedGroups matched) {
  const auto takes_part = [matched](const CacheGroup& group) {
    return group.SharesPrefixes() && (matched == MatchedGroups::kAll || !group.IsState());
  };
  std::vector<GroupMatch> matches(groups.size());
  ConvergedPrefix converged;
  const bool any = std::any_of(groups.begin(), groups.end(), takes_part);
  int32_t bound = std::max(tier.floor_tokens, any ? num_prefix_pages * prefix_granularity : 0);
  const auto probe = [&](std::size_t g) {
    matches[g] = Match(groups[g], tier, keys[g], bound);
    const int32_t extent = matches[g].extent_tokens;
    bound = std::min(bound, extent - extent % prefix_granularity);
  };

  // Closed groups first: they give the cheap upper bound, and what they alone cover is worth knowing.
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (!groups[g].geometry().IsPrefixClosed()) continue;
    probe(g);
    converged.prefix_closed_tokens = bound;
  }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (!groups[g].geometry().IsPrefixClosed() && takes_part(groups[g])) probe(g);
  }
  // A window's match under a lower bound is not the truncation of its match under a higher one, so it is derived anew.
  for (bool changed = true; changed;) {
    changed = false;
    for (std::size_t g = 0; g < groups.size(); ++g) {
      if (groups[g].geometry().IsPrefixClosed() || matches[g].extent_tokens <= bound) continue;
      probe(g);
      changed = true;
    }
  }

  converged.num_common_tokens = bound;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].SharesPrefixes()) {
      const int32_t granularity = groups[g].geometry().block_granularity();
      matches[g].mask.resize(static_cast<std::size_t>((bound - tier.floor_tokens) / granularity));
    }
    converged.masks.push_back(std::move(matches[g].mask));
  }
  return converged;
}

}  // namespace tokenspeed
