// Golden values of the hash chain, and that hashing resumes from any stored hash.

#include "prefix/prefix_hasher.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "prefix/cache_key.h"
#include "prefix/sha256_instructions.h"
#include "prefix/sha256.h"
#include "tests/broken_invariant.h"

namespace tokenspeed {
namespace {

std::string Sha256Hex(const std::string& text, std::size_t piece) {
  Sha256 sha;
  const auto* bytes = reinterpret_cast<const uint8_t*>(text.data());
  for (std::size_t i = 0; i < text.size(); i += piece) sha.Update({bytes + i, std::min(piece, text.size() - i)});
  return PrefixHash{sha.Finish()}.ToHex();
}

TEST(PrefixHasher, sha256_published_vectors) {
  EXPECT_EQ(Sha256Hex("", 1), std::string("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"));
  EXPECT_EQ(Sha256Hex("abc", 3), std::string("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"));
  EXPECT_EQ(Sha256Hex("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 64),
            std::string("248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"));
  EXPECT_EQ(Sha256Hex(std::string(1000000, 'a'), 4096),
            std::string("cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"));
}

TEST(PrefixHasher, sha256_does_not_depend_on_how_the_input_is_cut) {
  std::mt19937 random(7);
  for (std::size_t length = 0; length < 200; ++length) {
    std::string text(length, '\0');
    for (char& c : text) c = static_cast<char>(random());
    const std::string whole = Sha256Hex(text, 1000);
    for (std::size_t piece : {1, 3, 55, 63, 64, 65}) EXPECT_EQ(Sha256Hex(text, piece), whole);
  }
}

TEST(PrefixHasher, instructions_of_the_processor_compress_like_the_plain_code) {
  if (!HasSha256Instructions()) GTEST_SKIP() << "this processor has no SHA-256 instructions";
  std::mt19937 random(7);
  for (int round = 0; round < 500; ++round) {
    std::array<uint32_t, 8> expected;
    std::array<uint8_t, 64> block;
    for (uint32_t& word : expected) word = static_cast<uint32_t>(random());
    for (uint8_t& byte : block) byte = static_cast<uint8_t>(random());
    std::array<uint32_t, 8> actual = expected;
    Sha256::CompressPortably(expected.data(), block.data());
    CompressWithInstructions(actual.data(), block.data());
    ASSERT_EQ(actual, expected);
  }
}

TEST(PrefixHasher, golden_prefix_hashes) {
  const std::vector<int32_t> first = {1, 2, 3, 4};
  const std::vector<int32_t> second = {5, 6, 7, 8};
  EXPECT_EQ(HashPrefixPage({}, std::nullopt).ToHex(),
            std::string("af5570f5a1810b7af78caf4bc70a660f0df51e42baf91d4de5b2328de0e83dfc"));
  const PrefixHash hash = HashPrefixPage(first, std::nullopt);
  EXPECT_EQ(hash.ToHex(), std::string("65a73aeec7de373d87d0bb665fb1b7e9c490f83287b644f3ea58f3eea1ee271f"));
  EXPECT_EQ(HashPrefixPage(second, hash).ToHex(),
            std::string("9f99734c64c898db6698530d61968eeba422fe1f4f044203644087f9ec65e01c"));
  const std::vector<std::string> keys = {"lora-A"};
  EXPECT_EQ(HashPrefixPage(first, std::nullopt, keys).ToHex(),
            std::string("1549bc3d1c248ea07de4626ca95d926600447775bbe638aa44abd6d92f8ee78a"));
}

TEST(PrefixHasher, framing_separates_tokens_priors_and_keys) {
  const std::vector<int32_t> tokens = {1};
  const std::vector<int32_t> negative = {-1};
  const PrefixHash prior = HashPrefixPage(tokens, std::nullopt);
  std::vector<PrefixHash> hashes = {prior, HashPrefixPage(negative, std::nullopt), HashPrefixPage(tokens, prior)};
  for (const std::vector<std::string>& keys :
       {std::vector<std::string>{"ab", ""}, {"a", "b"}, {"", "ab"}, {"ab"}, {""}}) {
    hashes.push_back(HashPrefixPage(tokens, std::nullopt, keys));
  }
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) EXPECT_FALSE(hashes[i] == hashes[j]);
  }
}

TEST(PrefixHasher, incremental_hashing_equals_hashing_at_once) {
  std::mt19937 random(11);
  std::vector<int32_t> tokens(137);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random());
  for (int32_t granularity : {1, 4, 16, 100}) {
    const int32_t pages = static_cast<int32_t>(tokens.size()) / granularity;
    std::vector<PrefixHash> at_once;
    ExtendPrefixHashes(tokens, granularity, pages, at_once);
    EXPECT_EQ(static_cast<int32_t>(at_once.size()), pages);
    std::vector<PrefixHash> grown;
    while (static_cast<int32_t>(grown.size()) < pages) {
      const int32_t target = std::min<int32_t>(pages, static_cast<int32_t>(grown.size() + random() % 4));
      // Only the tokens that exist by then are shown.
      ExtendPrefixHashes(std::span(tokens).first(target * granularity), granularity, target, grown);
    }
    EXPECT_TRUE(grown == at_once);
    ExtendPrefixHashes(tokens, granularity, pages / 2, grown);
    EXPECT_TRUE(grown == at_once);
  }
}

std::vector<PrefixHash> Chain(const std::string& salt, const std::string& version) {
  const std::vector<int32_t> tokens = {1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<PrefixHash> hashes;
  ExtendPrefixHashes(tokens, 4, 1, hashes, ChainKeys(salt, version));
  ExtendPrefixHashes(tokens, 4, 2, hashes, ChainKeys(salt, version));
  return hashes;
}

TEST(PrefixHasher, salts_and_weight_versions_separate_every_page_of_a_chain) {
  const std::string zero(1, '\0');
  const std::vector<std::pair<std::string, std::string>> identities = {
      {"", ""},  {"a", ""},  {"", "a"},  {"a", "a"},  {"ab", ""},  {"", "ab"},
      {"a", "b"}, {"b", "a"}, {zero, ""}, {"", zero}, {zero, zero}, {"\xff\xfe", ""}};
  std::vector<PrefixHash> seen;
  for (const auto& [salt, version] : identities) {
    const std::vector<PrefixHash> chain = Chain(salt, version);
    ASSERT_TRUE(chain.size() == 2);
    EXPECT_TRUE(chain == Chain(salt, version));
    for (const PrefixHash& hash : chain) {
      for (const PrefixHash& other : seen) EXPECT_FALSE(hash == other);
    }
    seen.insert(seen.end(), chain.begin(), chain.end());
  }
}

TEST(PrefixHasher, a_chain_without_salt_and_version_is_the_documented_one) {
  const std::vector<PrefixHash> chain = Chain("", "");
  EXPECT_EQ(chain[0].ToHex(), std::string("65a73aeec7de373d87d0bb665fb1b7e9c490f83287b644f3ea58f3eea1ee271f"));
  EXPECT_EQ(chain[1].ToHex(), std::string("9f99734c64c898db6698530d61968eeba422fe1f4f044203644087f9ec65e01c"));
}

TEST(PrefixHasher, incomplete_pages_are_never_hashed) {
  const std::vector<int32_t> tokens(7, 1);
  std::vector<PrefixHash> hashes;
  EXPECT_FATAL(ExtendPrefixHashes(tokens, 4, 2, hashes));
  EXPECT_FATAL(ExtendPrefixHashes(tokens, 0, 1, hashes));
}

TEST(PrefixHasher, keys_expand_in_token_order_and_differ_in_every_field) {
  std::vector<PrefixHash> hashes;
  const std::vector<int32_t> tokens = {1, 2, 3, 4};
  ExtendPrefixHashes(tokens, 2, 2, hashes);
  const std::vector<CacheKey> keys = ExpandCacheKeys(hashes, 3, 2);
  ASSERT_TRUE(keys.size() == 4);
  for (int32_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(keys[i].content_hash == hashes[i / 2]);
    EXPECT_EQ(keys[i].page_offset, i % 2);
    EXPECT_EQ(keys[i].group_id, 3);
    EXPECT_EQ(keys[i].namespace_id, uint32_t{0});
  }
  CacheKey other = keys[0];
  other.namespace_id = 1;
  EXPECT_FALSE(other == keys[0]);
  EXPECT_FALSE(CacheKeyHash()(other) == CacheKeyHash()(keys[0]));
  EXPECT_FALSE(CacheKeyHash()(keys[0]) == CacheKeyHash()(keys[1]));
}

}  // namespace
}  // namespace tokenspeed
