// Prefix hashes: the identity of a prompt's prefixes.
//
// Invariants:
// - The hash of a prefix page depends on all tokens before it, through the chain of prior hashes.
// - Distinct (prior, tokens, extra keys) never give the same byte stream: every field is preceded by its length.
// - Keys that stand beside the first page's tokens separate whole chains: no page of one is a page of another.
// - Hashing may resume from any stored hash and gives what hashing from the start gives.
//
// Thread safety: pure functions over values.

#ifndef TOKENSPEED_PREFIX_PREFIX_HASHER_H_
#define TOKENSPEED_PREFIX_PREFIX_HASHER_H_

#include <compare>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "prefix/sha256.h"

namespace tokenspeed {

// Digest of one prefix page and, through the chain, of everything before it.
struct PrefixHash {
  Sha256::Digest bytes = {};

  // 64 lowercase hexadecimal characters: the form in which Python and external stores see it.
  std::string ToHex() const;
  // Nothing for any other text.
  static std::optional<PrefixHash> FromHex(std::string_view text);

  friend auto operator<=>(const PrefixHash&, const PrefixHash&) = default;
};

// SHA-256 over: u32 byte length of the prior digest (0 or 32) and the digest; u32 token count and each token as u32; and,
// only when there are any, u32 count of extra keys and each with its u32 byte length. All integers little endian.
PrefixHash HashPrefixPage(std::span<const int32_t> tokens, const std::optional<PrefixHash>& prior,
                          std::span<const std::string> extra_keys = {});

// Appends the hashes of the prefix pages that `hashes` lacks, up to `num_prefix_pages` in total. `tokens` starts at
// position 0 and covers num_prefix_pages * prefix_granularity tokens at least. Does nothing when no page is missing.
// `chain_keys` are the extra keys of the first page; they must be the same for the whole life of `hashes`.
void ExtendPrefixHashes(std::span<const int32_t> tokens, int32_t prefix_granularity, int32_t num_prefix_pages,
                        std::vector<PrefixHash>& hashes, std::span<const std::string> chain_keys = {});

// The chain keys of a prefix that is shared only under the same salt and the same weights: none when both are empty,
// otherwise always both, so that a salt is never taken for a version.
std::vector<std::string> ChainKeys(const std::string& cache_salt, const std::string& weight_version);

}  // namespace tokenspeed

#endif  // TOKENSPEED_PREFIX_PREFIX_HASHER_H_
