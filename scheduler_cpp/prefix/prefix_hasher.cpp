#include "prefix/prefix_hasher.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>

#include "core/check.h"

namespace tokenspeed {
namespace {

void AddLittleEndian(uint32_t value, Sha256& sha) {
  std::array<uint8_t, sizeof(value)> bytes;
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(value >> (8 * i));
  sha.Update(bytes);
}

void AddTokens(std::span<const int32_t> tokens, Sha256& sha) {
  if constexpr (std::endian::native == std::endian::little) {
    sha.Update({reinterpret_cast<const uint8_t*>(tokens.data()), tokens.size_bytes()});
  } else {
    for (int32_t token : tokens) AddLittleEndian(static_cast<uint32_t>(token), sha);
  }
}

}  // namespace

std::string PrefixHash::ToHex() const {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  hex.reserve(2 * bytes.size());
  for (uint8_t byte : bytes) {
    hex.push_back(kDigits[byte >> 4]);
    hex.push_back(kDigits[byte & 15]);
  }
  return hex;
}

std::optional<PrefixHash> PrefixHash::FromHex(std::string_view text) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  PrefixHash hash;
  if (text.size() != 2 * hash.bytes.size()) return std::nullopt;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const std::size_t digit = kDigits.find(text[i]);
    if (digit == std::string_view::npos) return std::nullopt;
    hash.bytes[i / 2] = static_cast<uint8_t>(hash.bytes[i / 2] << 4 | digit);
  }
  return hash;
}

PrefixHash HashPrefixPage(std::span<const int32_t> tokens, const std::optional<PrefixHash>& prior,
                          std::span<const std::string> extra_keys) {
  Sha256 sha;
  AddLittleEndian(prior ? Sha256::kDigestBytes : 0, sha);
  if (prior) sha.Update(prior->bytes);
  AddLittleEndian(static_cast<uint32_t>(tokens.size()), sha);
  AddTokens(tokens, sha);
  if (!extra_keys.empty()) {
    AddLittleEndian(static_cast<uint32_t>(extra_keys.size()), sha);
    for (const std::string& key : extra_keys) {
      AddLittleEndian(static_cast<uint32_t>(key.size()), sha);
      sha.Update({reinterpret_cast<const uint8_t*>(key.data()), key.size()});
    }
  }
  return PrefixHash{sha.Finish()};
}

void ExtendPrefixHashes(std::span<const int32_t> tokens, int32_t prefix_granularity, int32_t num_prefix_pages,
                        std::vector<PrefixHash>& hashes, std::span<const std::string> chain_keys) {
  const auto page_tokens = static_cast<std::size_t>(prefix_granularity);
  TOKENSPEED_CHECK(prefix_granularity > 0, "the prefix granularity must be positive");
  if (num_prefix_pages <= static_cast<int32_t>(hashes.size())) return;
  TOKENSPEED_CHECK(tokens.size() / page_tokens >= static_cast<std::size_t>(num_prefix_pages),
                   "an incomplete prefix page cannot be hashed");
  // Never just one page more: chains grow page by page, and each reservation moves the chain.
  const auto num_pages = static_cast<std::size_t>(num_prefix_pages);
  if (num_pages > hashes.capacity()) hashes.reserve(std::max(num_pages, 2 * hashes.capacity()));
  for (std::size_t page = hashes.size(); page < num_pages; ++page) {
    const auto page_span = tokens.subspan(page * page_tokens, page_tokens);
    hashes.push_back(page == 0 ? HashPrefixPage(page_span, std::nullopt, chain_keys)
                               : HashPrefixPage(page_span, hashes.back()));
  }
}

std::vector<std::string> ChainKeys(const std::string& cache_salt, const std::string& weight_version) {
  if (cache_salt.empty() && weight_version.empty()) return {};
  return {cache_salt, weight_version};
}

}  // namespace tokenspeed
