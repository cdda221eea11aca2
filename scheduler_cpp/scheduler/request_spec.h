// What a caller submits.

#ifndef TOKENSPEED_SCHEDULER_REQUEST_SPEC_H_
#define TOKENSPEED_SCHEDULER_REQUEST_SPEC_H_

#include <cstdint>
#include <string>
#include <vector>

namespace tokenspeed {

struct RequestSpec {
  std::string request_id;
  std::vector<int32_t> tokens;  // the prompt
  int32_t max_new_tokens = 0;   // 0 = undeclared
  int32_t priority = 0;         // the lower, the earlier it is served
  std::string cache_salt = {};  // prefixes are shared only between requests of the same salt
  // Id of another request with the same tokens and salt, live or earlier in the same submission, whose blocks are taken
  // over once its prompt is computed; empty for none. A request that names one cannot be named itself.
  std::string fork_of = {};
  // Whether its prompt may skip what is cached; without, every token of it is fed. What it computes is cached either way.
  bool reads_prefix_cache = true;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_REQUEST_SPEC_H_
